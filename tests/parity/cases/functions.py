"""tf.function around and inside of replica functions."""

import numpy as np

from .. import differences
from ..rules import CENTRAL, DEFAULT, MIRRORED, MIRRORED_8, SINGLE, rule
from .common import THREE, here, ids, make, my_id, nothing, run


@rule(*THREE, DEFAULT)
def a_function_may_reduce_along_an_axis(api, strategy):
    @api.function
    def mean(x):
        return strategy.reduce("mean", strategy.run(lambda x: x * 2.0, (x,)), axis=0)

    return mean(ids(api, strategy, lambda i: [i, i + 1]))


@rule(*THREE, CENTRAL)
def a_function_may_gather(api, strategy):
    @api.function
    def gather(x):
        return strategy.gather(strategy.run(lambda x: x * 2.0, (x,)), axis=0)

    return gather(ids(api, strategy, lambda i: [i, i + 1]))


@rule(*THREE)
def a_function_may_give_a_nest(api, strategy):
    @api.function
    def step(x):
        y = strategy.run(lambda x: {"double": x * 2.0, "pair": (x, x + 1.0)}, (x,))
        return y, strategy.reduce("sum", y["double"], axis=None)

    y, total = step(ids(api, strategy, lambda i: i + 1))
    return [api.parts(strategy, y["pair"][1]), api.parts(strategy, y["double"]), total]


@rule(*THREE, DEFAULT)
def a_function_is_not_traced_again_for_the_same_shapes(api, strategy):
    traces = []

    @api.function
    def step(x):
        traces.append(1)
        return strategy.run(lambda x: x + 1.0, (x,))

    step(ids(api, strategy))
    num_first = len(traces)
    for i in range(2):
        step(ids(api, strategy, lambda j, i=i: j + i))
    return len(traces) == num_first


@rule(*THREE)
def a_function_takes_python_values(api, strategy):
    @api.function
    def step(x, scale, flag):
        return strategy.run(lambda x: x * scale if flag else x, (x,))

    x = ids(api, strategy, lambda i: i + 1)
    return [api.parts(strategy, step(x, 3.0, flag)) for flag in (True, False)]


@rule(*THREE)
def a_function_takes_keyword_arguments(api, strategy):
    @api.function
    def step(x, *, y):
        return strategy.run(lambda x, y: x + y, (x, y))

    x = ids(api, strategy)
    return api.parts(strategy, step(x, y=api.array(2.0)))


@rule(*THREE)
def a_function_keeps_the_context_of_its_caller(api, strategy):
    seen = []

    @api.function
    def look():
        seen.append([api.dist.has_strategy(), api.dist.in_cross_replica_context()])
        return api.array(1.0)

    with strategy.scope():
        look()
    return seen[0]


@rule(*THREE)
def a_function_may_enter_the_scope(api, strategy):
    @api.function
    def step():
        with strategy.scope():
            return strategy.reduce("sum", strategy.run(lambda: my_id(api) + 1), axis=None)

    return step()


@rule(*THREE)
def a_function_may_read_an_on_read_variable(api, strategy):
    v = make(api, strategy, 0.0, "ON_READ", "SUM")

    @api.function
    def step():
        strategy.run(lambda: nothing(v.assign_add(my_id(api) + 1)))
        return v.read_value()

    return [step(), step(), v.numpy()]


@rule(*THREE)
def a_function_may_reset_an_on_read_variable(api, strategy):
    v = make(api, strategy, 4.0, "ON_READ", "SUM")

    @api.function
    def reset():
        v.assign(0.0)

    reset()
    return v.numpy()


@rule(*THREE, DEFAULT)
def a_function_assigns_in_order(api, strategy):
    v = make(api, strategy, 1.0, aggregation="MEAN")

    @api.function
    def step():
        v.assign_add(1.0)
        strategy.run(lambda: nothing(v.assign(v * 10.0)))
        v.assign_sub(5.0)
        return v * 1.0

    return [step(), v.numpy()]


@rule(*THREE)
def a_replica_function_that_is_a_function_assigns_variables(api, strategy):
    v = make(api, strategy, 1.0, aggregation="SUM")

    @api.function
    def step(x):
        v.assign_add(x + my_id(api))

    for _ in range(2):
        strategy.run(step, (api.array(1.0),))
    return v.numpy()


@rule(*THREE)
def a_replica_function_that_is_a_function_reduces(api, strategy):
    step = api.function(lambda: here(api).all_reduce("sum", my_id(api) + 1))
    return api.parts(strategy, strategy.run(step))


@rule(*THREE)
def gradients_in_a_function_are_those_of_each_replica(api, strategy):
    v = make(api, strategy, 2.0)

    @api.function
    def step(x):
        def replica_fn(x):
            return api.grad(lambda w: w * w * x, v.read_value())

        return strategy.run(replica_fn, (x,))

    return api.parts(strategy, step(ids(api, strategy, lambda i: i + 1)))


@rule(*THREE, MIRRORED_8)
def an_epoch_in_a_function_trains_as_its_steps_do(api, strategy):
    w = make(api, strategy, 0.0, aggregation="MEAN")
    total = make(api, strategy, 0.0, "ON_READ", "SUM")

    def replica_fn(x):
        gradient = api.grad(lambda w: api.square(w - x), w.read_value())
        w.assign_sub(0.1 * here(api).all_reduce("mean", gradient))
        total.assign_add(x)

    @api.function
    def epoch(x):
        for _ in range(3):
            strategy.run(replica_fn, (x,))

    x = ids(api, strategy, lambda i: i + 1)
    epoch(x)
    epoch(x)
    return [w.numpy(), total.numpy()]


@rule(*THREE)
def a_function_may_call_a_function(api, strategy):
    @api.function
    def inner(x):
        return strategy.reduce("sum", x, axis=None)

    @api.function
    def outer(x):
        return inner(strategy.run(lambda x: x + 1.0, (x,))) * 2.0

    return outer(ids(api, strategy))


@rule(*THREE)
def an_exception_in_a_function_is_the_users(api, strategy):
    @api.function
    def step():
        def replica_fn():
            raise ValueError("mine")

        strategy.run(replica_fn)

    return [api.outcome(step), api.dist.has_strategy()]


@rule(*THREE)
def a_function_takes_batches_of_a_distributed_dataset(api, strategy):
    data = np.arange(8, dtype=np.float32)
    dataset = strategy.experimental_distribute_dataset(api.dataset(data, 4, drop_remainder=True))

    @api.function
    def step(x):
        return strategy.reduce("sum", strategy.run(lambda x: x * 2.0, (x,)), axis=0)

    return [step(x) for x in dataset]


@rule(
    MIRRORED,
    differs=differences.DATASET_IN_FUNCTION,
    gives={"error": "value"},
)
def a_function_may_loop_over_a_distributed_dataset(api, strategy):
    data = np.arange(8, dtype=np.float32)
    dataset = strategy.experimental_distribute_dataset(api.dataset(data, 4, drop_remainder=True))

    @api.function
    def epoch(dataset):
        total = 0.0
        for x in dataset:
            total += strategy.reduce("sum", x, axis=0)
        return total

    return api.outcome(lambda: epoch(dataset))


@rule(*SINGLE, MIRRORED)
def a_function_without_a_strategy_is_a_function(api, strategy):
    return api.function(lambda x: x * 2.0 + 1.0)(api.array(3.0))


@rule(*THREE)
def a_variable_assigned_by_a_function_is_seen_by_run(api, strategy):
    v = make(api, strategy, 1.0)

    @api.function
    def double():
        v.assign(v * 2.0)

    double()
    double()
    return run(api, strategy, lambda: v * 1.0)
