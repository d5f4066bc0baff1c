"""tf.IndexedSlices: the rows that a gradient has changed."""

import numpy as np

from ..rules import MIRRORED, rule
from .common import here, my_id, slices


@rule(MIRRORED)
def the_sum_of_slices_adds_rows(api, strategy):
    def step():
        x = slices(api, (my_id(api) + 1) * api.ones((2, 1)), [0, 2], (3, 1))
        total = here(api).all_reduce("sum", x)
        return {"values": total.values, "indices": total.indices}

    result = strategy.run(step)
    values = np.asarray(api.plain(api.parts(strategy, result["values"])[0]))
    indices = api.plain(api.parts(strategy, result["indices"])[0])
    rows = np.zeros((3, 1))
    np.add.at(rows, indices, values)
    return rows.tolist()


@rule(MIRRORED)
def slices_are_not_gathered(api, strategy):
    def step():
        x = slices(api, (my_id(api) + 1) * api.ones((2, 1)), [0, 2], (3, 1))
        here(api).all_gather(x, axis=0)

    return api.outcome(lambda: strategy.run(step))


@rule(MIRRORED)
def slices_of_each_replica_go_into_a_scatter(api, strategy):
    with strategy.scope():
        v = api.Variable([0.0, 0.0, 0.0], aggregation=api.VariableAggregation.SUM)

    def make(c):
        return slices(api, api.array([1.0 + c.replica_id_in_sync_group]), [1], (3,))

    x = strategy.experimental_distribute_values_from_function(make)
    strategy.run(v.scatter_add, args=(x,))
    return v.numpy()
