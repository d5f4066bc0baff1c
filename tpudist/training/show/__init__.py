"""What a training run prints and draws."""
