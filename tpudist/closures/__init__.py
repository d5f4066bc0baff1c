"""Closures: functions that some worker runs at some time, without a word to the others."""
