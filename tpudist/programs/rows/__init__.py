"""Runs a function on padded batches with exactly the results of the real rows: see README.md."""
