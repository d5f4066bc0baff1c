"""What parameter servers hold, and how it changes: no more than once for each closure."""
