"""Strategy.gather and ReplicaContext.all_gather: shapes and axes."""

from .. import differences
from ..rules import CENTRAL, MANY, MIRRORED, MIRRORED_8, MULTI_WORKER, SINGLE, TPU, rule
from .common import here, my_id, numbered


@rule(*MANY, *SINGLE, MIRRORED_8, MULTI_WORKER)
def gather_concatenates_in_the_order_of_replicas(api, strategy):
    x = strategy.run(lambda: my_id(api) * api.ones((1, 2)))
    return [strategy.gather(x, axis=axis) for axis in (0, 1)]


@rule(MIRRORED, CENTRAL, TPU)
def gather_takes_parts_of_unequal_size_along_the_axis(api, strategy):
    rows = lambda c: api.ones((1 + c.replica_id_in_sync_group, 2))  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(rows)
    return strategy.gather(x, axis=0)


@rule(MIRRORED, CENTRAL, TPU)
def gather_refuses_parts_of_unequal_size_in_another_dim(api, strategy):
    rows = lambda c: api.ones((1 + c.replica_id_in_sync_group, 2))  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(rows)
    return api.outcome(lambda: strategy.gather(x, axis=1))


@rule(MIRRORED, CENTRAL, TPU)
def gather_refuses_scalars(api, strategy):
    x = strategy.run(lambda: my_id(api))
    return api.outcome(lambda: strategy.gather(x, axis=0))


@rule(*MANY, *SINGLE)
def gather_gives_a_plain_value_as_it_is(api, strategy):
    return strategy.gather(api.array([1.0, 2.0]), axis=0)


@rule(MIRRORED, CENTRAL, TPU)
def gather_joins_an_equal_result_once_for_each_replica(api, strategy):
    x = api.array([[1.0, 2.0]])
    return [strategy.gather(strategy.run(lambda: x + 1), axis=axis) for axis in (0, 1)]


@rule(CENTRAL)
def gather_counts_a_negative_axis_from_the_end_where_it_copies(api, strategy):
    x = strategy.run(lambda: my_id(api) * api.ones((2, 1)))
    return strategy.gather(x, axis=-1)


@rule(MIRRORED, differs=differences.NEGATIVE_AXIS, gives=[[0.0, 1.0], [0.0, 1.0]])
def gather_refuses_a_negative_axis(api, strategy):
    x = strategy.run(lambda: my_id(api) * api.ones((2, 1)))
    return api.outcome(lambda: strategy.gather(x, axis=-1))


@rule(MIRRORED, CENTRAL, TPU)
def gather_keeps_the_dtype(api, strategy):
    x = strategy.run(lambda: api.reshape(my_id(api, "int32"), (1,)))
    y = strategy.run(lambda: api.reshape(my_id(api, "float16"), (1,)))
    x, y = strategy.gather(x, axis=0), strategy.gather(y, axis=0)
    return [x, x.dtype, y, y.dtype]


@rule(*MANY)
def gather_takes_parts_of_several_rows(api, strategy):
    rows = api.array([[1.0], [2.0]])
    x = strategy.run(lambda: rows + my_id(api) * 10)
    return strategy.gather(x, axis=0)


SHAPES = ((1,), (3,), (1, 1), (2, 3), (1, 2, 3), (2, 1, 2, 1))


def _gathers(shape, axis):
    size = "x".join(map(str, shape))

    def gather(api, strategy):
        return strategy.gather(strategy.run(lambda: numbered(api, shape)), axis=axis)

    def all_gather(api, strategy):
        x = strategy.run(lambda: here(api).all_gather(numbered(api, shape), axis=axis))
        return api.parts(strategy, x)

    gather.__name__ = f"gather_joins_parts_of_shape_{size}_along_axis_{axis}"
    all_gather.__name__ = f"all_gather_joins_parts_of_shape_{size}_along_axis_{axis}"
    rule(MIRRORED, CENTRAL)(gather)
    rule(MIRRORED)(all_gather)


for _shape in SHAPES:
    for _axis in {0, len(_shape) - 1}:
        _gathers(_shape, _axis)


@rule(MIRRORED, CENTRAL, TPU)
def gather_of_unequal_parts_along_another_axis(api, strategy):
    make = lambda c: api.ones((2, 1 + c.replica_id_in_sync_group))  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(make)
    return strategy.gather(x, axis=1)


@rule(MIRRORED)
def all_gather_of_a_nest_of_values_of_each_replica(api, strategy):
    def step():
        x = my_id(api) * api.ones((1,))
        a, b = here(api).all_gather([x, x + 10], axis=0)
        return a + b

    return api.parts(strategy, strategy.run(step))


@rule(MIRRORED, TPU)
def gradients_go_through_an_all_gather_of_a_nest(api, strategy):
    def step():
        x = (my_id(api) + 1) * api.ones((2,))

        def f(a, b):
            a, b = here(api).all_gather((a, b), axis=0)
            return a * b

        return api.grad(f, x, x + 1)

    return [api.parts(strategy, g) for g in strategy.run(step)]


@rule(MIRRORED, TPU)
def all_gather_refuses_parts_of_unequal_size_in_another_dim(api, strategy):
    make = lambda c: api.ones((1 + c.replica_id_in_sync_group, 2))  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(make)
    return api.outcome(
        lambda: api.parts(strategy, strategy.run(lambda x: here(api).all_gather(x, axis=1), (x,)))
    )


@rule(MIRRORED)
def all_gather_of_unequal_parts_reaches_every_replica(api, strategy):
    make = lambda c: api.array([[1.0, 2.0]] * (2 - c.replica_id_in_sync_group))  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(make)
    step = lambda x: api.sum(here(api).all_gather(x * 10, axis=0))  # noqa: E731
    return api.parts(strategy, strategy.run(step, (x,)))


@rule(MIRRORED, TPU)
def gather_in_a_merge_call(api, strategy):
    merge = lambda strategy, x: strategy.gather(x, axis=0)  # noqa: E731
    step = lambda: here(api).merge_call(merge, (numbered(api, (2,)),))  # noqa: E731
    return api.parts(strategy, strategy.run(step))
