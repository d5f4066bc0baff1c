"""Tables of rows by 64-bit id: storage, optimizers, eviction and checkpoints."""
