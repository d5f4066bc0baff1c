"""From the host's memory to the devices, ahead of the loop."""
