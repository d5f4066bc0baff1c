"""From each replica's loss to one update."""
