"""State between steps: Variables, and the arrays of NNX objects."""
