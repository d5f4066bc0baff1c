"""Gradients: losses, optimizers and microbatches, from the loss of a replica to one update."""
