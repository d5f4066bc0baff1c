"""What replicas hold."""
