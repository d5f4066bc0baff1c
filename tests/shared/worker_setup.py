"""Start of programs with several processes: connects them, and defines two functions."""

import jax

import tpudist

tpudist.emulate()
strategy = tpudist.MultiWorkerMirroredStrategy()
me = jax.process_index()


def total(x):
    return tpudist.get_replica_context().all_reduce("sum", x)


def double(x):
    return tpudist.get_replica_context().all_reduce("sum", 2 * x)
