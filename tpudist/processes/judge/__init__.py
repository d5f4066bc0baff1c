"""Reports of all processes, and the verdict that process 0 finds in them, without communication."""
