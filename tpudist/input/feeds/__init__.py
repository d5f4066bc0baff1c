"""Feeds: batches of a source, divided into the parts of each replica."""
