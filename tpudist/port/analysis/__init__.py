"""Reads a program that is ported: names, roles of functions, kinds of values."""
