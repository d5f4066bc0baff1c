"""Facts about TPU chips, slices and the links between them."""
