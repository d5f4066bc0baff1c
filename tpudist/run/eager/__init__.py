"""Replica functions that run in Python, replica by replica: for debuggers and `print`."""
