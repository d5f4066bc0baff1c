"""Continues a run without a restart after the loss of a process."""
