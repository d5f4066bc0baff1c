"""Compiles for TPUs where there is none."""
