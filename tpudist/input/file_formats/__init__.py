"""Readers of files of records, one module for each format."""
