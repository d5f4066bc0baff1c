"""Compares a distributed step with the same step on one device."""
