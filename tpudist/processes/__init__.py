"""Processes of a run meet, agree, are watched and end together."""
