"""Engines: run actors in threads or processes, call them, and report when one has died."""
