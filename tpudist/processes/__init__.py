"""Connects the processes of a run, compares and watches them, and ends them together."""
