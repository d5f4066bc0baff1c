"""The check of accelerators behind `tpudist doctor --accelerator`.

The command runs each section (correct numbers, speed of the devices, of collectives and of the
host) in a process of its own, so that a crash or a hang costs one item and not the report.
"""
