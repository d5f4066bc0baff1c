"""Values of replicas."""
