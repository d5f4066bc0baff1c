"""Finds sums over replicas that one device with all rows would not compute."""
