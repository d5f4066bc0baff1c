"""`tpudist.function`, `run_steps` and Variables created in functions, on two processes."""

import pytest

from processes import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROGRAM = """
    import jax.numpy as jnp
    import numpy as np
    import tpudist
    from flax import nnx
    from processes import report
    from tpudist import VariableAggregation, VariableSynchronization

    tpudist.emulate()
    strategy = tpudist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = tpudist.Variable(jnp.zeros(2), aggregation=VariableAggregation.MEAN)
        seen = tpudist.Variable(
            0.0, synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )

    def step(x):
        replica = tpudist.get_replica_context()
        start = tpudist.Variable(parts + 5, name="start")  # the first replica's: 5
        w.assign_add(x.sum(0) + start)
        seen.assign_add(replica.example_mask(x).sum() * 1.0)
        return replica.all_reduce("sum", x.sum())

    @tpudist.function
    def train(iterator):
        total = strategy.run(step, (next(iterator),))
        return total + strategy.reduce("sum", parts, axis=None)

    data = np.arange(96.0, dtype=np.float32).reshape(48, 2)
    dataset = strategy.experimental_make_numpy_dataset(data).batch(16).repeat(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    first = float(train(iterator))
    second = float(train(iterator))
    rest = [float(x) for x in strategy.run_steps(step, iterator, 4)]
    numbers = [first, second, rest, w.numpy().tolist(), float(seen)]

    # A model that is an argument, outside of the scope.
    with strategy.scope():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def step_of_model(model, x):
        model.bias[...] += 1
        return tpudist.get_replica_context().all_reduce("sum", x.sum())

    @tpudist.function
    def train_model(model, iterator):
        return strategy.run(step_of_model, (model, next(iterator)))

    data = strategy.experimental_make_numpy_dataset(np.ones((16, 2), np.float32)).batch(8)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    sums = [float(train_model(model, iterator)) for _ in range(2)]
    report({"numbers": numbers, "model": [*sums, float(model.bias[0])]})
"""


@pytest.fixture(scope="module")
def reports():
    return [finished.result for finished in run_processes(PROGRAM, devices_per_process=4)]


def test_two_processes_match_hand_computed_numbers(reports):
    totals = [sum(range(32 * i, 32 * (i + 1))) * 1.0 for i in range(3)]
    # Each of 6 steps adds the mean over 8 replicas of their two rows' sums, and 5.
    mean = [2 * sum(range(column, 96, 2)) / 8 + 6 * 5 for column in (0, 1)]
    expected = [totals[0] + 28, totals[1] + 28, [totals[2], *totals], mean, 96.0]
    assert [x["numbers"] for x in reports] == [expected, expected]


def test_finding_the_strategy_of_a_function_does_not_move_the_model(reports):
    """No process can access the complete model."""
    assert [x["model"] for x in reports] == [[16.0, 16.0, 2.0]] * 2
