"""Processes that survive the loss of another one continue without a restart."""
