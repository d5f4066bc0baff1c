"""Which ways of splitting a model a search tries, and what it finds."""
