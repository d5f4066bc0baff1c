"""Progress of scheduled functions: samples of a run, and the table and files that show them."""
