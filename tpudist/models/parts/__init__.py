"""What a transformer is made of."""
