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
    with pytest.raises(ValueError, match="Scalars have no dim"):
        strategy.gather(total, 0)


def test_a_plain_value_belongs_to_no_replica(strategy):
    for x in (np.arange(2), jnp.arange(2), [1, 2]):
        assert jax.tree.leaves(strategy.gather(x, 0))[0].shape in [(2,), ()]
    assert strategy.experimental_local_results(np.arange(2))[1:] == ()
    assert tpudist.function(lambda: strategy.gather(jnp.arange(2), 0))().shape == (2,)


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
def test_processes_that_make_other_values_are_told():
    found = [r.result for r in run_processes(UNEQUAL, devices_per_process=2)]
    for result in found:
        assert result["rows"] == [0, 0, 1, 0, 1, 2]
        assert "ValueError" in result["dims"]
        assert "(0: [1, 1], 1: [1, 1], 2: [2, 2], 3: [2, 2])" in result["dims"]
        assert "ValueError" in result["ranks"]
        assert "different structures" in result["structures"]
        assert result["dtypes"] == [1.0] * 4
        assert result["still there"] == [0, 1, 2, 3]
    assert "Process 1 has made no values" in found[0]["failed"]
    assert found[1]["failed"].startswith("IndexError")
