"""What the command line of `scripts/train.py` says, and where a run puts its files."""
