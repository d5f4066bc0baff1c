"""Reads the text of programs that XLA compiled."""
