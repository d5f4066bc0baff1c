"""Training programs over datasets whose last batch is partial, on TensorFlow and on tpudist.

Each program is a pair, `gan_tensorflow.py` and `gan_tpudist.py` for one: what somebody has who
wrote it for tf.distribute, and the same text with the model and the arithmetic in JAX. Neither
knows of padding: `jnp.mean`, `x.shape[0]` and `jax.lax.scan` mean the rows that a replica really
has.

A module has `program(strategy, global_batch)`, which gives `run(*datasets)`: one epoch from the
initial values on, as a dictionary of results. The same program runs over one dataset after the
other, with tails of 1, 2, 3, ... rows. `runs.py` says which, `recorded/partial_batches.json` holds
the results of TensorFlow. To record again, with PARITY_PYTHON as for `parity.record`:

    cd tests && python -m parity.tails.record
"""
