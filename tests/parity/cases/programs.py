"""Programs as users write them: training loops, metrics, sync batch norm, tf.function."""

import numpy as np

from ..rules import (
    CENTRAL,
    DEFAULT,
    MANY,
    MIRRORED,
    MIRRORED_8,
    MULTI_WORKER,
    ONE_DEVICE,
    TPU,
    rule,
)
from .common import here, ids, my_id, nothing

X = np.linspace(-1.0, 1.0, 16, dtype=np.float32)


Y = 3.0 * X + 1.0


@rule(*MANY, ONE_DEVICE, DEFAULT, MIRRORED_8, MULTI_WORKER)
def a_training_loop_learns_the_same_line(api, strategy):
    """Gradients of the global batch's mean, whatever the number of replicas."""
    batch = 8
    with strategy.scope():
        w, b = (api.Variable(0.0, aggregation=api.VariableAggregation.MEAN) for _ in "wb")

    def step(x, y):
        def loss(w, b):
            return api.sum(api.square(w * x + b - y)) / batch

        gradients = api.grad(loss, w.read_value(), b.read_value())
        gradients = here(api).all_reduce("sum", gradients)
        for v, g in zip((w, b), gradients, strict=True):
            v.assign_sub(0.1 * g)
        return loss(w.read_value(), b.read_value())

    losses = []
    for _ in range(2):
        for x, y in _batches(api, strategy, batch):
            losses.append(strategy.reduce("sum", strategy.run(step, (x, y)), axis=None))
    return [api.plain(losses), w.numpy(), b.numpy()]


def _batches(api, strategy, batch):
    """The global batches, split by hand: the same rows for every kind of input."""
    n = strategy.num_replicas_in_sync
    each = batch // n
    for start in range(0, len(X), batch):

        def part(data, start=start):
            return strategy.experimental_distribute_values_from_function(
                lambda c: api.array(
                    data[start + each * c.replica_id_in_sync_group :][:each].tolist()
                )
            )

        yield part(X), part(Y)


@rule(MIRRORED, ONE_DEVICE, DEFAULT, TPU, MIRRORED_8)
def a_training_loop_over_a_dataset_learns_the_same_line(api, strategy):
    dataset = strategy.experimental_distribute_dataset(api.dataset((X, Y), 8))
    with strategy.scope():
        w = api.Variable(0.0, aggregation=api.VariableAggregation.ONLY_FIRST_REPLICA)

    def step(x, y):
        gradient = api.grad(lambda w: api.sum(api.square(w * x - y)) / 8.0, w.read_value())
        w.assign_sub(0.1 * here(api).all_reduce("sum", gradient))

    for _ in range(2):
        for x, y in dataset:
            strategy.run(step, (x, y))
    return w.numpy()


@rule(MIRRORED, TPU, MIRRORED_8, ONE_DEVICE)
def a_metric_counts_on_each_replica_and_is_read_as_a_sum(api, strategy):
    with strategy.scope():
        total, count = (
            api.Variable(
                0.0,
                synchronization=api.VariableSynchronization.ON_READ,
                aggregation=api.VariableAggregation.SUM,
            )
            for _ in range(2)
        )

    def step(x):
        total.assign_add(api.sum(x))
        count.assign_add(api.array(2.0))

    for _ in range(3):
        strategy.run(step, (ids(api, strategy, lambda i: [i, i + 1]),))
    mean = total.numpy() / count.numpy()
    with strategy.scope():
        total.assign(0.0)
        count.assign(0.0)
    return [mean, total.numpy(), count.numpy()]


@rule(MIRRORED, TPU, ONE_DEVICE, MIRRORED_8)
def sync_batch_norm_by_merge_call_normalises_over_all_replicas(api, strategy):
    def mean_of_all(strategy, x):
        return strategy.reduce("mean", x, axis=None)

    def step(x):
        mean = here(api).merge_call(mean_of_all, (api.sum(x) / 2.0,))
        square = here(api).merge_call(mean_of_all, (api.sum(x * x) / 2.0,))
        return (x - mean) / (square - mean * mean + 1e-3) ** 0.5

    result = strategy.run(step, (ids(api, strategy, lambda i: [i, 2 * i + 1]),))
    return api.parts(strategy, result)


@rule(MIRRORED, TPU, ONE_DEVICE)
def moving_statistics_are_averaged_when_they_are_read(api, strategy):
    with strategy.scope():
        moving = api.Variable(
            0.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.MEAN,
        )
    for _ in range(2):
        strategy.run(lambda: nothing(moving.assign(0.5 * moving + 0.5 * my_id(api))))
    return moving.numpy()


@rule(*MANY, ONE_DEVICE)
def an_evaluation_averages_over_all_examples(api, strategy):
    x = strategy.run(lambda: api.array([1.0, 2.0, 3.0]) + my_id(api))
    return strategy.reduce("mean", x, axis=0)


@rule(MIRRORED, ONE_DEVICE, DEFAULT, CENTRAL, TPU)
def an_optimizer_with_momentum_keeps_slots(api, strategy):
    mean = api.VariableAggregation.MEAN
    with strategy.scope():
        w = api.Variable([1.0, 2.0], aggregation=mean)
        slot = api.Variable([0.0, 0.0], aggregation=mean)

    def step():
        gradient = here(api).all_reduce("mean", w.read_value() - my_id(api))
        slot.assign(0.9 * slot + gradient)
        w.assign_sub(0.1 * slot.read_value())

    for _ in range(3):
        strategy.run(step)
    return [w.numpy(), slot.numpy()]


@rule(*MANY, ONE_DEVICE)
def predictions_are_gathered_in_order(api, strategy):
    x = strategy.run(lambda: my_id(api) * 10 + api.array([0.0, 1.0]))
    return strategy.gather(x, axis=0)


@rule(MIRRORED, TPU, ONE_DEVICE, DEFAULT, CENTRAL)
def a_function_may_call_run_and_reduce(api, strategy):
    @api.function
    def train(x):
        result = strategy.run(lambda x: x * 2.0, (x,))
        return strategy.reduce("sum", result, axis=None)

    return train(ids(api, strategy, lambda i: i + 1))


@rule(MIRRORED, TPU, ONE_DEVICE, DEFAULT)
def a_function_may_assign_variables(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0, aggregation=api.VariableAggregation.MEAN)

    @api.function
    def train():
        strategy.run(lambda: nothing(v.assign_add(my_id(api))))
        v.assign_add(10.0)
        return v.read_value()

    return [train(), train(), v.numpy()]


@rule(MIRRORED, TPU, ONE_DEVICE)
def a_function_may_run_several_steps(api, strategy):
    with strategy.scope():
        v = api.Variable(0.0, aggregation=api.VariableAggregation.SUM)

    @api.function
    def train(x):
        for _ in range(3):
            strategy.run(lambda x: nothing(v.assign_add(x)), (x,))
        return v.read_value()

    return train(ids(api, strategy, lambda i: i + 1))


@rule(MIRRORED, TPU)
def a_function_takes_and_gives_values_of_each_replica(api, strategy):
    @api.function
    def double(x):
        return strategy.run(lambda x: x * 2.0, (x,))

    result = double(double(ids(api, strategy, lambda i: i + 1)))
    return [isinstance(result, api.PerReplica), api.parts(strategy, result)]


@rule(MIRRORED, TPU, ONE_DEVICE)
def a_replica_function_may_be_a_function(api, strategy):
    step = api.function(lambda x: x + my_id(api))
    return api.parts(strategy, strategy.run(step, (api.array(1.0),)))


@rule(MIRRORED, TPU, ONE_DEVICE)
def a_function_sees_what_was_assigned_between_its_calls(api, strategy):
    with strategy.scope():
        v = api.Variable(1.0)

    @api.function
    def read():
        return api.parts(strategy, strategy.run(lambda: v * 2.0))[0]

    first = read()
    v.assign(5.0)
    return [first, read()]
