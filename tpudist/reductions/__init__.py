"""Reductions: reduce, gather and all-reduce over replicas, and the algorithms to choose from."""
