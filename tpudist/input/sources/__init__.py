"""What may be given as a dataset."""
