"""Estimates the time, memory and traffic of a compiled program."""
