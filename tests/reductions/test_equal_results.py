"""What replicas have computed counts on each of them, also where it is equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from processes import run_processes

N = 4


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy(jax.devices()[:N])


def _equal():
    return tpudist.get_replica_context().all_reduce("sum", jnp.arange(2.0))


@pytest.mark.parametrize("in_function", [False, True], ids=["outside", "in a function"])
def test_an_equal_result_is_summed_joined_and_shown_once_for_each_replica(strategy, in_function):
    def total():
        x = strategy.run(_equal)
        parts = strategy.experimental_local_results(x)
        return strategy.reduce("sum", x, axis=None), strategy.gather(x, 0), parts

    sums, joined, parts = tpudist.function(total)() if in_function else total()
    assert sums.tolist() == [0, N * N]
    assert joined.tolist() == [0, N] * N
    assert [x.tolist() for x in parts] == [[0, N]] * N


def test_an_equal_result_joins_as_differing_ones_do_along_any_dim(strategy):
    def both():
        x = _equal()[None] * jnp.ones((3, 1))
        return x, x + 0 * tpudist.get_replica_context().replica_id_in_sync_group

    equal, differing = strategy.run(both)
    assert isinstance(equal, jax.Array)
    assert isinstance(differing, tpudist.PerReplica)
    for axis in (0, 1, -1):
        np.testing.assert_array_equal(
            strategy.gather(equal, axis), strategy.gather(differing, axis)
        )


def test_partial_batches_join_as_many_equal_results_as_full_ones(strategy):
    dataset = tpudist.NumpyDataset(np.arange(13.0, dtype=np.float32)).batch(8)

    @tpudist.function
    def joined(batch):
        def step(x):
            return tpudist.get_replica_context().all_reduce("sum", x.sum())[None]

        return strategy.gather(strategy.run(step, (batch,)), 0)

    found = [joined(x).tolist() for x in strategy.experimental_distribute_dataset(dataset)]
    assert found == [[28] * N, [50] * N]


def test_a_scalar_has_no_dim_to_join_along(strategy):
    total = strategy.run(lambda: tpudist.get_replica_context().all_reduce("sum", jnp.ones(())))
    with pytest.raises(ValueError, match="A scalar has no dim"):
        strategy.gather(total, 0)


def test_a_plain_value_belongs_to_no_replica(strategy):
    for x in (np.arange(2), jnp.arange(2)):
        assert strategy.gather(x, 0).tolist() == [0, 1]
        assert len(strategy.experimental_local_results(x)) == 1
    assert [x.tolist() for x in strategy.gather([3, 4], 0)] == [3, 4]
    for x in (np.arange(2), jnp.arange(2)):
        assert tpudist.function(lambda x=x: strategy.gather(x, 0))().tolist() == [0, 1]


def test_a_function_and_its_caller_count_alike(strategy):
    """What a function captures, holds in Variables or reduces is what it is outside."""
    result = strategy.run(_equal)
    with strategy.scope():
        held = tpudist.Variable(np.ones(2, np.float32))
    for value in (
        lambda: result,
        lambda: held,
        lambda: strategy.reduce("sum", result, axis=None),
        lambda: strategy.gather(result, 0),
        lambda: strategy.run(lambda x: x, (result,)),
    ):

        def both(value=value):
            return strategy.gather(value(), 0), len(strategy.experimental_local_results(value()))

        (joined, count), (expected, _) = tpudist.function(both)(), both()
        np.testing.assert_array_equal(joined, expected)
        assert len(joined) == N * len(value().read_value() if value() is held else value())
        assert count == N


@pytest.mark.parametrize("count", ["gather", "experimental_local_results"])
def test_values_that_may_be_one_or_one_per_replica_are_rejected(strategy, count):
    """Outside it depends on the arrays that an argument happens to be computed from."""

    def ask(x):
        return (
            strategy.gather(x, 0) if count == "gather" else strategy.experimental_local_results(x)
        )

    for function, x in [
        (lambda x: ask(x), np.ones(2, np.float32)),
        (lambda x: ask(x), strategy.run(_equal)),
        (lambda x: ask(2 * x), strategy.run(_equal)),
    ]:
        with pytest.raises(ValueError, match="one value, or one for each of the 4 replicas.*run"):
            tpudist.function(function)(x)
    one = tpudist.OneDeviceStrategy()
    assert tpudist.function(lambda x: one.gather(x, 0))(np.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_components_are_combined_in_a_function_as_outside(strategy, aggregation):
    with strategy.scope():
        own = tpudist.Variable(
            np.zeros(2, np.float32),
            synchronization=tpudist.VariableSynchronization.ON_READ,
            aggregation=tpudist.VariableAggregation[aggregation],
        )

    @strategy.run
    def _():
        own.assign(jnp.full(2, 1.0 + tpudist.get_replica_context().replica_id_in_sync_group))

    def combine():
        sums = [strategy.reduce(op, own, axis) for op in ("sum", "mean") for axis in (None, 0)]
        return [*sums, strategy.gather(own, 0)]

    for inside, outside in zip(tpudist.function(combine)(), combine(), strict=True):
        np.testing.assert_allclose(inside, outside)
    assert np.asarray(combine()[0]).tolist() == [10, 10]


def test_one_replica_has_one_of_each():
    one = tpudist.OneDeviceStrategy()
    x = one.run(lambda: jnp.arange(2))
    assert one.gather(x, 0).shape == (2,)
    assert len(one.experimental_local_results(x)) == 1


UNEQUAL = """
    import jax
    import numpy as np
    import tpudist
    from processes import report

    tpudist.emulate()
    strategy = tpudist.MultiWorkerMirroredStrategy()
    mine = jax.process_index() + 1


    def outcome(value_fn):
        try:
            values = strategy.experimental_distribute_values_from_function(value_fn)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return np.asarray(strategy.gather(values, 0)).tolist()


    report({
        "rows": outcome(lambda c: np.arange(c.replica_id_in_sync_group)),
        "dims": outcome(lambda c: np.zeros((mine, mine))),
        "ranks": outcome(lambda c: np.zeros((1,) * mine)),
        "structures": outcome(lambda c: {"ab"[mine - 1]: 1}),
        "dtypes": outcome(lambda c: np.ones(1, np.float32 if mine == 1 else np.int32)),
        "failed": outcome(lambda c: [0, 1][mine]),
        "still there": outcome(lambda c: np.full(1, c.replica_id_in_sync_group)),
    })
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_processes_with_different_values_raise_an_error():
    found = [r.result for r in run_processes(UNEQUAL, devices_per_process=2)]
    for result in found:
        assert result["rows"] == [0, 0, 1, 0, 1, 2]
        assert "ValueError" in result["dims"]
        assert "(0: [1, 1], 1: [1, 1], 2: [2, 2], 3: [2, 2])" in result["dims"]
        assert "ValueError" in result["ranks"]
        assert "different structures" in result["structures"]
        assert result["dtypes"] == [1.0] * 4
        assert result["still there"] == [0, 1, 2, 3]
    assert "Process 1 made no values" in found[0]["failed"]
    assert found[1]["failed"].startswith("IndexError")
