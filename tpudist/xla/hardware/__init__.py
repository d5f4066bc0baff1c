"""Chips, slices of them and the links between."""
