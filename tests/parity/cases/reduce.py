"""tf.distribute.Strategy.reduce: ops, axes, and kinds of values."""

from .. import differences
from ..rules import (
    CENTRAL,
    DEFAULT,
    MANY,
    MIRRORED,
    MIRRORED_8,
    MULTI_WORKER,
    ONE_DEVICE,
    SINGLE,
    TPU,
    rule,
)
from .common import here, my_id, numbered


@rule(*MANY, *SINGLE, MIRRORED_8, MULTI_WORKER)
def reduce_sums_over_replicas(api, strategy):
    x = strategy.run(lambda: my_id(api) + 1)
    return strategy.reduce(api.dist.ReduceOp.SUM, x, axis=None)


@rule(*MANY, *SINGLE, MIRRORED_8, MULTI_WORKER)
def reduce_averages_over_replicas(api, strategy):
    x = strategy.run(lambda: my_id(api) + 1)
    return strategy.reduce(api.dist.ReduceOp.MEAN, x, axis=None)


@rule(*MANY, *SINGLE)
def reduce_takes_the_name_of_the_op_in_any_case(api, strategy):
    x = strategy.run(lambda: my_id(api) + 1)
    return [strategy.reduce(op, x, axis=None) for op in ("sum", "SUM", "Mean", "MEAN")]


@rule(*MANY, *SINGLE)
def reduce_over_replicas_keeps_the_shape(api, strategy):
    x = strategy.run(lambda: my_id(api) + api.ones((2, 3)))
    return strategy.reduce("sum", x, axis=None)


@rule(*MANY, *SINGLE)
def reduce_along_an_axis_sums_over_it_too(api, strategy):
    x = strategy.run(lambda: my_id(api) + api.array([[1.0, 2.0], [3.0, 4.0]]))
    return [strategy.reduce("sum", x, axis=axis) for axis in (0, 1)]


@rule(*MANY, *SINGLE)
def reduce_along_an_axis_averages_over_all_elements(api, strategy):
    x = strategy.run(lambda: my_id(api) + api.array([[1.0, 2.0], [3.0, 4.0]]))
    return [strategy.reduce("mean", x, axis=axis) for axis in (0, 1)]


@rule(MIRRORED, ONE_DEVICE, CENTRAL, TPU)
def reduce_takes_a_negative_axis(api, strategy):
    x = strategy.run(lambda: my_id(api) + api.array([[1.0, 2.0], [3.0, 5.0]]))
    return [strategy.reduce("sum", x, axis=-1), strategy.reduce("mean", x, axis=-2)]


@rule(MIRRORED, ONE_DEVICE, CENTRAL)
def reduce_takes_a_tuple_of_axes(api, strategy):
    x = strategy.run(lambda: my_id(api) + api.array([[1.0, 2.0], [3.0, 5.0]]))
    return [strategy.reduce("sum", x, axis=(0, 1)), strategy.reduce("mean", x, axis=(0, 1))]


@rule(differs=differences.LIST_OF_AXES, gives=24.0)
def reduce_takes_a_list_of_axes(api, strategy):
    x = strategy.run(lambda: my_id(api) + api.array([[1.0, 2.0], [3.0, 4.0]]))
    return api.outcome(lambda: strategy.reduce("sum", x, axis=[0, 1]))


@rule(MIRRORED, CENTRAL, TPU)
def reduce_along_axis_0_counts_the_rows_that_are_there(api, strategy):
    rows = lambda c: api.array([1.0, 2.0, 3.0, 4.0][: 4 - 2 * c.replica_id_in_sync_group])  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(rows)
    return [strategy.reduce(op, x, axis=0) for op in ("sum", "mean")]


@rule(MIRRORED, CENTRAL, TPU)
def reduce_along_axis_0_counts_a_replica_without_rows_as_nothing(api, strategy):
    rows = lambda c: api.array([5.0, 7.0][: 2 - 2 * c.replica_id_in_sync_group])  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(rows)
    return [strategy.reduce(op, x, axis=0) for op in ("sum", "mean")]


@rule(MIRRORED, CENTRAL, TPU)
def reduce_without_axis_refuses_parts_of_unequal_shapes(api, strategy):
    rows = lambda c: api.ones((1 + c.replica_id_in_sync_group,))  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(rows)
    return api.outcome(lambda: strategy.reduce("sum", x, axis=None))


@rule(MIRRORED, ONE_DEVICE, CENTRAL)
def reduce_keeps_integers_in_a_sum(api, strategy):
    x = strategy.run(lambda: my_id(api, "int32") + 3)
    total = strategy.reduce("sum", x, axis=None)
    return [total, total.dtype]


@rule(MIRRORED, CENTRAL, differs=differences.MEAN_OF_INTEGERS, gives=[3.5, "float32"])
def reduce_averages_integers_as_floats(api, strategy):
    x = strategy.run(lambda: my_id(api, "int32") + 3)
    mean = strategy.reduce("mean", x, axis=None)
    return [mean, mean.dtype]


@rule(*MANY, ONE_DEVICE)
def reduce_refuses_an_unknown_op(api, strategy):
    x = strategy.run(lambda: my_id(api))
    return api.outcome(lambda: strategy.reduce("median", x, axis=None))


@rule(differs=differences.ASSERTIONS, gives={"error": "type"})
def reduce_refuses_an_op_that_is_no_op(api, strategy):
    x = strategy.run(lambda: my_id(api))
    return api.outcome(lambda: strategy.reduce(3, x, axis=None))


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL, TPU)
def reduce_requires_the_axis(api, strategy):
    return api.outcome(lambda: strategy.reduce("sum", api.ones(())))


@rule(MIRRORED, CENTRAL, TPU)
def reduce_refuses_an_axis_that_is_not_there(api, strategy):
    x = strategy.run(lambda: my_id(api) + api.ones((2,)))
    return [
        api.outcome(lambda: strategy.reduce("mean", x, axis=1)),
        api.outcome(lambda: strategy.reduce("sum", x, axis=1)),
        api.outcome(lambda: strategy.reduce("mean", x, axis="rows")),
    ]


@rule(*MANY, *SINGLE)
def reduce_gives_the_mean_of_a_plain_value_as_it_is(api, strategy):
    return strategy.reduce("mean", api.array([1.0, 3.0]), axis=None)


@rule(
    *MANY,
    differs=differences.SUM_OF_PLAIN,
    gives=lambda n: [1.0 * n, 3.0 * n],
)
def reduce_refuses_the_sum_of_a_plain_value(api, strategy):
    return api.outcome(lambda: strategy.reduce("sum", api.array([1.0, 3.0]), axis=None))


@rule(*SINGLE)
def reduce_gives_the_sum_of_a_plain_value_on_one_replica_as_it_is(api, strategy):
    return strategy.reduce("sum", api.array([1.0, 3.0]), axis=None)


@rule(*MANY, *SINGLE)
def reduce_along_an_axis_counts_a_plain_value_for_every_replica(api, strategy):
    x = api.array([1.0, 3.0])
    return [strategy.reduce(op, x, axis=0) for op in ("sum", "mean")]


@rule(*MANY)
def reduce_counts_a_reduced_result_for_every_replica(api, strategy):
    step = lambda: api.dist.get_replica_context().all_reduce("sum", my_id(api) + 1)  # noqa: E731
    x = strategy.run(step)
    return [strategy.reduce(op, x, axis=None) for op in ("sum", "mean")]


@rule(MIRRORED)
def reduce_maps_over_a_nest(api, strategy):
    x = strategy.run(lambda: {"a": my_id(api), "b": (my_id(api) + 1, my_id(api) * 4)})
    return strategy.reduce("sum", x, axis=None)


@rule(MIRRORED, CENTRAL, TPU)
def reduce_averages_a_mirrored_variable_to_its_value(api, strategy):
    with strategy.scope():
        v = api.Variable(3.0)
        return strategy.reduce("mean", v, axis=None)


@rule(MIRRORED, TPU, differs=differences.SUM_OF_MIRRORED, gives=lambda n: 3.0 * n)
def reduce_refuses_the_sum_of_a_mirrored_variable(api, strategy):
    with strategy.scope():
        v = api.Variable(3.0)
        return api.outcome(lambda: strategy.reduce("sum", v, axis=None))


@rule(MIRRORED, TPU)
def reduce_combines_the_components_of_an_on_read_variable(api, strategy):
    with strategy.scope():
        v = api.Variable(
            0.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.SUM,
        )
    strategy.run(lambda: v.assign_add(my_id(api) + 1))
    return [strategy.reduce("sum", v, axis=None), strategy.reduce("mean", v, axis=None)]


def _reduces(op, axis):
    def reduce(api, strategy):
        x = strategy.run(lambda: numbered(api, (2, 3, 2)))
        return strategy.reduce(op, x, axis=axis)

    name = "nothing" if axis is None else str(axis).replace("-", "minus ")
    reduce.__name__ = f"reduce_{op}s_three_dims_along_{name}"
    rule(MIRRORED, ONE_DEVICE, CENTRAL)(reduce)


for _op in ("sum", "mean"):
    for _axis in (None, 0, 1, 2, -1, (0, 2), (0, 1, 2)):
        _reduces(_op, _axis)


@rule(MIRRORED, TPU, CENTRAL)
def reduce_in_a_merge_call_along_an_axis(api, strategy):
    def merge(strategy, x):
        return strategy.reduce("mean", x, axis=0), strategy.reduce("sum", x, axis=1)

    step = lambda: here(api).merge_call(merge, (numbered(api, (2, 2)),))  # noqa: E731
    return [api.parts(strategy, x) for x in strategy.run(step)]


@rule(MIRRORED, CENTRAL, TPU)
def reduce_to_in_float16(api, strategy):
    x = strategy.run(lambda: my_id(api, "float16") + 1)
    total = strategy.reduce("sum", x, axis=None)
    return [total, total.dtype]


@rule(MIRRORED, MIRRORED_8, TPU)
def many_values_are_reduced_together(api, strategy):
    x = [strategy.run(lambda i=i: (my_id(api) + i) * api.ones((i + 1,))) for i in range(4)]
    return strategy.extended.batch_reduce_to("mean", [(y, y) for y in x])
