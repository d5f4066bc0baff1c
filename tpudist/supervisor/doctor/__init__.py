"""Checks of a machine before a run: clocks, devices, disks, network and versions."""
