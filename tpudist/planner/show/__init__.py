"""A plan or a search as text, as a table, as a page and as a chart."""
