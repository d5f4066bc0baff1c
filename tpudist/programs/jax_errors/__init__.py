"""Explains errors of JAX about mesh axes and about the values of traced arrays."""
