"""What the models are trained on, and the simplest predictor that each must beat."""
