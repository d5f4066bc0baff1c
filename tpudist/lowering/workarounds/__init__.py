"""Ways around bugs of XLA: one file per bug, with the program that shows when it is gone."""
