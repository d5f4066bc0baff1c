"""Transfer of batches from host memory to the devices, ahead of the loop."""
