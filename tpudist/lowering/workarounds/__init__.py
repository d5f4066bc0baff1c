"""Workarounds for bugs of XLA, one file per bug; `partitioner_bugs` reproduces each bug."""
