"""all_gather of partial batches: what replicas hold is padded, what comes back is exact."""

import jax.numpy as jnp
import numpy as np
import pytest

import tpudist


@pytest.fixture(scope="module", params=[1, 2, 8])
def strategy(request):
    return tpudist.MirroredStrategy([f"cpu:{i}" for i in range(request.param)])


def batches(strategy, num_rows=11, size=8):
    data = np.arange(num_rows * 2, dtype=np.float32).reshape(num_rows, 2)
    dataset = strategy.experimental_make_numpy_dataset(data).batch(size)
    return data, list(strategy.experimental_distribute_dataset(dataset))


def test_gathered_rows_come_back_without_padding(strategy):
    data, found = batches(strategy)

    def step(x):
        gathered = tpudist.get_replica_context().all_gather(2 * x, axis=0)
        return gathered, gathered.T

    results = [strategy.run(step, (x,)) for x in found]
    assert np.concatenate([rows for rows, _ in results]).tolist() == (2 * data).tolist()
    assert np.concatenate([columns for _, columns in results], 1).tolist() == (2 * data).T.tolist()


def test_rows_are_followed_to_other_dims(strategy):
    data, found = batches(strategy)
    [_, partial] = [strategy.run(lambda x: x.T + 1, (x,)) for x in found]
    assert strategy.gather(partial, axis=1).tolist() == (data[8:].T + 1).tolist()
    assert strategy.gather(partial, axis=-1).shape == (2, 3)
    sizes = [x.shape[1] for x in strategy.experimental_local_results(partial)]
    assert sum(sizes) == 3
    if strategy.num_replicas_in_sync > 1:
        assert strategy.reduce("sum", partial, axis=1).tolist() == (data[8:] + 1).sum(0).tolist()
        mean = strategy.reduce("mean", partial, axis=(0, 1))
        assert float(mean) == pytest.approx((data[8:] + 1).mean())
        with pytest.raises(ValueError, match=r"rows along dim 1.*no common shape.*axis=1\)"):
            strategy.reduce("sum", partial, axis=0)
        with pytest.raises(ValueError, match="real rows along dim 1. Gather along that dim"):
            strategy.gather(partial, axis=0)


def test_the_mask_tells_which_gathered_rows_are_real(strategy):
    data, found = batches(strategy)

    def step(x):
        replica = tpudist.get_replica_context()
        gathered = replica.all_gather(x, axis=0)
        mask = replica.example_mask(gathered)
        return jnp.where(mask[:, None], gathered, 0).sum(0), mask.sum(), replica.num_examples(x)

    totals, counts = np.zeros(2), []
    for x in found:
        total, real, num_examples = strategy.run(step, (x,))
        totals += np.asarray(total)
        counts.append(int(real))
        assert int(num_examples) == int(real)
    assert counts == [8, 3]
    assert totals.tolist() == data.sum(0).tolist()


def test_values_of_other_sizes_are_returned_whole(strategy):
    """As many rows as the batch, by accident: they do not grow with it."""
    _, found = batches(strategy)
    rows = 8

    def step(x):
        return tpudist.get_replica_context().all_reduce("sum", jnp.zeros((rows, 3)) + x.sum())

    assert [strategy.run(step, (x,)).shape for x in found] == [(rows, 3)] * 2


def test_values_of_uneven_rows_from_a_function(strategy):
    n = strategy.num_replicas_in_sync
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: np.full((context.replica_id_in_sync_group + 1, 1), 1.0, np.float32)
    )
    gathered = strategy.run(lambda x: tpudist.get_replica_context().all_gather(x, 0), (parts,))
    assert gathered.shape == (n * (n + 1) // 2, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_parts_that_are_uneven_along_any_dim_are_gathered(strategy, axis):
    n = strategy.num_replicas_in_sync

    def value(i):
        shape = [2, 3, 4]
        shape[axis] = i + 1
        return np.full(shape, i, np.float32)

    parts = strategy.experimental_distribute_values_from_function(
        lambda context: value(context.replica_id_in_sync_group)
    )
    expected = np.concatenate([value(i) for i in range(n)], axis)
    assert strategy.gather(parts, axis=axis).tolist() == expected.tolist()
    gathered = strategy.run(lambda x: tpudist.get_replica_context().all_gather(x, axis), (parts,))
    assert gathered.tolist() == expected.tolist()
    local = strategy.experimental_local_results(strategy.run(lambda x: x + 1, (parts,)))
    assert [x.tolist() for x in local] == [(value(i) + 1).tolist() for i in range(n)]


def test_parts_of_other_ranks_or_of_no_numbers_are_refused():
    strategy = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    for shapes in ([(2,), (2, 2)], [(1, 1), (2, 2)], [(), (1,)]):
        with pytest.raises(ValueError, match="They may differ only in the size of one dim"):
            strategy.experimental_distribute_values_from_function(
                lambda context, shapes=shapes: np.ones(shapes[context.replica_id_in_sync_group])
            )
    with pytest.raises(TypeError, match="is 'a', but replicas hold only arrays of numbers"):
        strategy.experimental_distribute_values_from_function(lambda context: "a")


def test_parts_that_are_uneven_in_another_dim_are_not_gathered():
    strategy = tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
    uneven, even = (
        strategy.experimental_distribute_values_from_function(
            lambda context, more=more: np.ones((1 + more * context.replica_id_in_sync_group, 2))
        )
        for more in (1, 0)
    )

    def step(x):
        return tpudist.get_replica_context().all_gather(x * 2, axis=1)

    with pytest.raises(ValueError, match=r"'step' received.*of different shapes.*\(1, 2\)"):
        strategy.run(step, (uneven,))
    assert strategy.run(step, (even,)).tolist() == [[2, 2, 2, 2]]
    _, found = batches(strategy)
    assert strategy.run(step, (found[0],)).shape == (4, 4)
    with pytest.raises(ValueError, match=r"'step' received.*of different shapes"):
        strategy.run(step, (found[1],))
    strategy.run(lambda x: tpudist.get_replica_context().all_gather(x.sum(0), 0), (found[1],))
