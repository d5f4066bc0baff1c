"""The parts of scripts/train.py that are not in the library: options, data, folder, report."""
