"""What steps read and change."""
