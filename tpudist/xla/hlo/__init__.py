"""Reads the program that XLA compiled."""
