"""The suites of scripts/bench.py: each figure against the same program written by hand."""
