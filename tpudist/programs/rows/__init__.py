"""Runs a function of padded rows with exactly the numbers of its real rows."""
