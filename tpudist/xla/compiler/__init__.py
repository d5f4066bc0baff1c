"""Compiles programs for TPUs on machines without TPUs."""
