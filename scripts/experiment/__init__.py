"""What a run of scripts/train.py is made of, beside the library: options, data, folder, report."""
