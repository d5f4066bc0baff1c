"""What terminals and notebooks show: tables, and a line that changes in place."""
