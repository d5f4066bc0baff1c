"""What each replica takes of a source of batches."""
