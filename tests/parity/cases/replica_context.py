"""tf.distribute.ReplicaContext: all_reduce, all_gather, and their gradients."""

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
from .common import here, ids, my_id, run


@rule(*MANY, *SINGLE, MIRRORED_8, MULTI_WORKER)
def all_reduce_gives_every_replica_the_sum(api, strategy):
    return run(api, strategy, lambda: here(api).all_reduce("sum", my_id(api) + 1))


@rule(*MANY, *SINGLE, MIRRORED_8, MULTI_WORKER)
def all_reduce_gives_every_replica_the_mean(api, strategy):
    op = api.dist.ReduceOp.MEAN
    return run(api, strategy, lambda: here(api).all_reduce(op, my_id(api) + 1))


@rule(*MANY, *SINGLE)
def all_reduce_works_on_arrays(api, strategy):
    step = lambda: here(api).all_reduce("sum", (my_id(api) + 1) * api.ones((2, 3)))  # noqa: E731
    return run(api, strategy, step)


@rule(*MANY, *SINGLE)
def all_reduce_maps_over_a_nest(api, strategy):
    def step():
        value = {"a": my_id(api), "b": [my_id(api) + 1, (my_id(api) * 4,)]}
        return here(api).all_reduce("mean", value)

    return api.parts(strategy, strategy.run(step)["b"][1][0])


@rule(*MANY, ONE_DEVICE)
def all_reduce_may_be_called_again_and_again(api, strategy):
    def step():
        x = here(api).all_reduce("sum", my_id(api) + 1)
        y = here(api).all_reduce("mean", x * my_id(api))
        return here(api).all_reduce("sum", y + my_id(api))

    return run(api, strategy, step)


@rule(MIRRORED, CENTRAL, TPU, ONE_DEVICE)
def all_reduce_refuses_an_unknown_op(api, strategy):
    return api.outcome(lambda: strategy.run(lambda: here(api).all_reduce("median", my_id(api))))


@rule(*MANY)
def all_reduce_keeps_integers_in_a_sum(api, strategy):
    seen = []

    def step():
        total = here(api).all_reduce("sum", my_id(api, "int32") + 1)
        seen.append(api.plain(total.dtype))
        return total

    return [run(api, strategy, step), seen[0]]


@rule(MIRRORED, differs=differences.MEAN_OF_INTEGERS, gives=[[1.5, 1.5], "float32"])
def all_reduce_averages_integers_as_floats(api, strategy):
    seen = []

    def step():
        mean = here(api).all_reduce("mean", my_id(api, "int32") + 1)
        seen.append(api.plain(mean.dtype))
        return mean

    return [run(api, strategy, step), seen[0]]


@rule(MIRRORED, TPU)
def all_reduce_counts_a_mirrored_variable_for_every_replica(api, strategy):
    with strategy.scope():
        v = api.Variable(2.0)
    return run(api, strategy, lambda: here(api).all_reduce("sum", v))


@rule(
    MIRRORED,
    TPU,
    differs=differences.SUM_OF_SHARED,
    gives=lambda n: [[1.0 * n, 3.0 * n]] * n,
)
def all_reduce_counts_a_captured_array_once(api, strategy):
    x = api.array([1.0, 3.0])
    return run(api, strategy, lambda: here(api).all_reduce("sum", x))


@rule(MIRRORED, CENTRAL, TPU)
def all_reduce_averages_a_captured_array_to_itself(api, strategy):
    x = api.array([1.0, 3.0])
    return run(api, strategy, lambda: here(api).all_reduce("mean", x))


@rule(*MANY)
def all_reduce_counts_equal_values_that_replicas_compute_for_each(api, strategy):
    x = api.array([1.0, 3.0])
    return run(api, strategy, lambda: here(api).all_reduce("sum", x + 1))


@rule(DEFAULT)
def all_reduce_of_the_default_context_gives_the_value(api, strategy):
    return [here(api).all_reduce(op, api.array([1.0, 2.0])) for op in ("sum", "mean")]


@rule(MIRRORED, MIRRORED_8, TPU, ONE_DEVICE)
def the_gradient_of_a_sum_is_the_sum_of_the_gradients(api, strategy):
    """y_i = c_i * all_reduce(x): every replica gets the sum of all c."""

    def step():
        c = my_id(api) + 1
        return api.grad(lambda x: c * here(api).all_reduce("sum", x), api.array(3.0))

    return run(api, strategy, step)


@rule(MIRRORED, MIRRORED_8, TPU, ONE_DEVICE)
def the_gradient_of_a_mean_is_the_mean_of_the_gradients(api, strategy):
    def step():
        c = my_id(api) + 1
        return api.grad(lambda x: c * here(api).all_reduce("mean", x), api.array(3.0))

    return run(api, strategy, step)


@rule(MIRRORED, TPU)
def gradients_go_through_all_reduces_of_a_nest(api, strategy):
    def step():
        def f(a, b):
            reduced = here(api).all_reduce("sum", {"a": a, "b": b})
            return reduced["a"] * reduced["b"]

        return api.grad(f, my_id(api) + 1, my_id(api) + 3)

    return [api.parts(strategy, g) for g in strategy.run(step)]


@rule(MIRRORED, TPU)
def gradients_go_through_an_all_reduce_of_a_square(api, strategy):
    """Like the variance of sync batch norm: the loss of each replica has values of all."""

    def step(x):
        def f(x):
            mean = here(api).all_reduce("mean", api.sum(x) / 2.0)
            return api.sum(api.square(x - mean))

        return api.grad(f, x)

    return run(api, strategy, step, ids(api, strategy, lambda i: [i, 2 * i + 1]))


@rule(*MANY, *SINGLE, MIRRORED_8, MULTI_WORKER)
def all_gather_concatenates_in_the_order_of_replicas(api, strategy):
    step = lambda: here(api).all_gather(my_id(api) * api.ones((1, 2)), axis=0)  # noqa: E731
    return run(api, strategy, step)


@rule(*MANY, *SINGLE)
def all_gather_concatenates_along_any_axis(api, strategy):
    step = lambda: here(api).all_gather(my_id(api) * api.ones((2, 1, 2)), axis=1)  # noqa: E731
    return run(api, strategy, step)


@rule(*MANY, *SINGLE)
def all_gather_maps_over_a_nest(api, strategy):
    def step():
        x = my_id(api) * api.ones((1,))
        gathered = here(api).all_gather({"a": x, "b": (x + 1, x * 4)}, axis=0)
        return gathered["b"][0] + gathered["a"]

    return run(api, strategy, step)


@rule(MIRRORED, CENTRAL)
def all_gather_takes_parts_of_unequal_size_along_the_axis(api, strategy):
    rows = lambda c: api.array([10.0, 20.0][: 1 + c.replica_id_in_sync_group])  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(rows)
    return run(api, strategy, lambda x: here(api).all_gather(x, axis=0), x)


@rule(MIRRORED, TPU)
def all_gather_refuses_scalars(api, strategy):
    return api.outcome(lambda: strategy.run(lambda: here(api).all_gather(my_id(api), axis=0)))


@rule(MIRRORED, differs=differences.NEGATIVE_AXIS, gives=[[[0.0, 1.0]]] * 2)
def all_gather_refuses_a_negative_axis(api, strategy):
    def step():
        return here(api).all_gather(my_id(api) * api.ones((1, 1)), axis=-1)

    return api.outcome(lambda: run(api, strategy, step))


@rule(MIRRORED, differs=differences.SUM_OF_SHARED, gives=[[1.0, 2.0, 1.0, 2.0]] * 2)
def all_gather_does_not_repeat_a_captured_array(api, strategy):
    x = api.array([1.0, 2.0])
    return run(api, strategy, lambda: here(api).all_gather(x, axis=0))


@rule(MIRRORED, MIRRORED_8, TPU)
def the_gradient_of_all_gather_is_the_own_part_of_the_sum(api, strategy):
    def step():
        n = strategy.num_replicas_in_sync
        weights = api.array([float(i + 1) for i in range(n)]) * (my_id(api) + 1)
        x = my_id(api) * api.ones((1,))
        return api.grad(lambda x: here(api).all_gather(x, axis=0) * weights, x)

    return run(api, strategy, step)


@rule(MIRRORED, TPU, CENTRAL)
def all_gather_keeps_integers(api, strategy):
    step = lambda: here(api).all_gather(api.reshape(my_id(api, "int32"), (1,)), axis=0)  # noqa: E731
    return run(api, strategy, step)
