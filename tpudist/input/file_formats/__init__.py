"""Readers of record files, one module per format."""
