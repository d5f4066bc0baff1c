"""What all strategies share: a mesh and a rule of placement."""
