"""Reads, rewrites and proves properties of the jaxpr of one replica."""
