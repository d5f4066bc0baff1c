"""Reports of plans and searches: their text, and its layout for terminals, notebooks and charts."""
