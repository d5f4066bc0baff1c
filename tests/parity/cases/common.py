"""Functions that many cases use."""

import collections

import numpy as np

from ..rules import MIRRORED, ONE_DEVICE, TPU

BOTH = (MIRRORED, TPU)
THREE = (MIRRORED, TPU, ONE_DEVICE)
METHODS = ("assign", "assign_add", "assign_sub")
AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")

Pair = collections.namedtuple("Pair", "first second")


def ids(api, strategy, make=lambda i: i):
    """A value of each replica, made of its number."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: api.array(make(float(c.replica_id_in_sync_group)))
    )


def my_id(api, dtype="float32"):
    """The number of this replica."""
    return api.cast(api.dist.get_replica_context().replica_id_in_sync_group, dtype)


def here(api):
    """The current replica context."""
    return api.dist.get_replica_context()


def numbered(api, shape):
    """1, 2, 3, ... in this shape, times the replica's number and one."""
    count = int(np.prod(shape))
    return api.array(np.arange(1, count + 1).reshape(shape).tolist()) * (my_id(api) + 1)


def slices(api, values, indices, dense_shape=None):
    """Rows `indices` of an array."""
    if api.library == "tensorflow":
        import tensorflow as tf

        shape = None if dense_shape is None else tf.constant(dense_shape)
        return tf.IndexedSlices(values, tf.constant(indices), shape)
    return api.dist.IndexedSlices(values, api.array(indices, "int32"), dense_shape)


def nothing(*_):
    """The result of functions that are called for their effect."""


def make(api, strategy, value=1.0, synchronization="AUTO", aggregation="NONE", **more):
    """A variable of the strategy's scope."""
    with strategy.scope():
        return api.Variable(
            value,
            synchronization=api.VariableSynchronization[synchronization],
            aggregation=api.VariableAggregation[aggregation],
            **more,
        )


def run(api, strategy, step, *args):
    """Returns the results of `step(*args)` on each replica."""
    return api.parts(strategy, strategy.run(step, args))
