"""Progress of scheduled functions: counts, stragglers, and the table that a person watches."""
