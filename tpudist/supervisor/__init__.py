"""Processes of a run that are started on this host, watched, started again, and ended."""
