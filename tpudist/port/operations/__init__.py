"""Ports operations on arrays: which have a namesake, and what their arguments are."""
