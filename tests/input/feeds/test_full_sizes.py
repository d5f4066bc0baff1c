"""Batches of several shapes and sizes: exact on every replica, and compiled once for each shape."""

import json
import logging

import jax
import numpy as np
import pytest

import tpudist
from compiles import NewCompiles
from tpudist.input import AutoShardPolicy
from tpudist.input.feeds.full_sizes import FullSizes

RNG = np.random.default_rng(0)
BUCKETS = [(8, 16), (8, 32), (5, 16), (3, 32), (8, 16), (1, 24), (6, 24), (8, 32)]


@pytest.fixture(params=[1, 2, 4])
def strategy(request):
    return tpudist.MirroredStrategy(jax.devices()[: request.param])


def make_batches(shapes):
    return [{"x": RNG.normal(size=s).astype(np.float32), "y": np.arange(s[0])} for s in shapes]


def a_step_over_buckets(batch):
    total = batch["x"].sum() + batch["y"].sum()
    return tpudist.get_replica_context().all_reduce("sum", total)


def sums(strategy, dataset):
    return [float(strategy.run(a_step_over_buckets, (batch,))) for batch in dataset]


def sums_of(batches):
    return [b["x"].sum() + b["y"].sum() for b in batches]


def test_a_full_batch_is_the_largest_so_far_of_its_shape():
    sizes = FullSizes()
    assert sizes.largest is None
    found = [sizes.record(kind, rows) for kind, rows in [("a", 4), ("b", 9), ("a", 2), ("a", 6)]]
    assert found == [4, 9, 4, 6]
    assert sizes.largest == 9

    again = FullSizes()
    again.restore(json.loads(json.dumps({"rows": 9} | sizes.get_state())), "rows")
    assert (again.record("a", 1), again.record("b", 1), again.record("c", 1)) == (6, 9, 1)


def test_the_size_of_one_shape_is_not_given_to_another():
    sizes, again = FullSizes(), FullSizes()
    sizes.record("a", 64)
    again.restore({"rows": 64} | sizes.get_state(), "rows")
    assert (again.largest, again.record("b", 16), again.record("a", 3)) == (64, 16, 64)


def test_a_state_of_an_earlier_release_has_the_size_of_its_one_shape():
    again = FullSizes()
    again.restore({"rows": 8}, "rows")
    assert again.record("a", 3) == 8


@pytest.mark.slow
def test_buckets_are_exact_and_compiled_once_for_each_shape(strategy):
    batches = make_batches(BUCKETS)
    new = NewCompiles()
    dataset = strategy.experimental_distribute_dataset(batches)
    for _ in range(2):
        np.testing.assert_allclose(sums(strategy, dataset), sums_of(batches), rtol=1e-4)
    compiled = [r for r in new() if r.function == "a_step_over_buckets"]
    # Full ones of three shapes, and partial ones; those of one row or six each have a size first.
    n = strategy.num_replicas_in_sync
    assert len(compiled) <= (len(set(BUCKETS)) if n == 1 else 3 * 2 + 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("partial_batch", ["pad", "shrink", "drop", "error"])
def test_batches_may_grow(strategy, partial_batch):
    batches = make_batches([(4, 3), (8, 3), (8, 3), (12, 3)])
    options = tpudist.InputOptions(partial_batch=partial_batch)
    dataset = strategy.experimental_distribute_dataset(batches, options)
    np.testing.assert_allclose(sums(strategy, dataset), sums_of(batches), rtol=1e-4)


def test_a_batch_is_partial_next_to_the_largest_of_its_shape(strategy):
    options = tpudist.InputOptions(partial_batch="drop")
    batches = make_batches([(4, 3), (2, 5), (8, 3), (4, 3), (2, 5)])
    dataset = strategy.experimental_distribute_dataset(batches, options)
    np.testing.assert_allclose(
        sums(strategy, dataset), sums_of([batches[i] for i in (0, 1, 2, 4)]), rtol=1e-4
    )
    options = tpudist.InputOptions(partial_batch="error")
    with pytest.raises(ValueError, match="Batch 3 of the dataset has 4 rows, fewer than .* of 8"):
        list(strategy.experimental_distribute_dataset(batches, options))


def test_batches_of_a_function_come_in_several_shapes(strategy):
    n = strategy.num_replicas_in_sync
    shapes = [s for s in [(4, 16), (2, 32), (6, 16)] for _ in range(n)]
    batches = make_batches(shapes)
    dataset = strategy.distribute_datasets_from_function(lambda _: batches)
    expected = np.reshape(sums_of(batches), (-1, n)).sum(1)
    np.testing.assert_allclose(sums(strategy, dataset), expected, rtol=1e-4)


def test_a_dataset_of_buckets_resumes_at_its_position(strategy):
    batches = make_batches(BUCKETS)
    for make in (
        lambda: strategy.experimental_distribute_dataset(batches),
        lambda: strategy.distribute_datasets_from_function(
            lambda _: [b for b in batches for _ in range(strategy.num_replicas_in_sync)]
        ),
    ):
        iterator = iter(make())
        for _ in range(3):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        rest = [str(x) for x in iterator]
        resumed = iter(make())
        resumed.set_state(state)
        assert [str(x) for x in resumed] == rest


@pytest.mark.parametrize(
    "make",
    [
        lambda s: s.experimental_distribute_dataset([]),
        lambda s: s.experimental_distribute_dataset(lambda: (x for x in () if x)),
        lambda s: s.experimental_distribute_dataset(
            tpudist.NumpyDataset(np.zeros((0, 3))).shuffle(1).batch(8)
        ),
        lambda s: s.experimental_distribute_dataset(
            tpudist.NumpyDataset(np.zeros((0, 3))).batch(8).repeat()
        ),
        lambda s: s.distribute_datasets_from_function(lambda _: []),
        lambda s: s.distribute_datasets_from_function(
            lambda _: tpudist.NumpyDataset(np.zeros((3, 3))).shard(5, 4).batch(2)
        ),
        lambda s: s.experimental_distribute_dataset(
            [], tpudist.InputOptions(auto_shard_policy=AutoShardPolicy.OFF)
        ),
    ],
)
def test_a_pass_without_batches_has_no_steps(strategy, make, caplog):
    """An evaluation may have an empty shard. TensorFlow does the same."""
    with caplog.at_level(logging.WARNING, "tpudist"):
        dataset = make(strategy)
        for _ in range(2):
            assert sums(strategy, dataset) == []
            assert not iter(dataset).get_next_as_optional().has_value()
    assert any("gave no batches" in r.getMessage() for r in caplog.records)


def test_a_pass_whose_batches_are_all_dropped_has_no_steps(caplog):
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    dataset = strategy.experimental_distribute_dataset(
        make_batches([(8, 3), (4, 3)]), tpudist.InputOptions(partial_batch="drop")
    )
    assert len(list(dataset)) == 1
    iterator = iter(dataset)
    state = iterator.get_state()
    next(iterator)
    assert list(iterator) == []
    iterator.set_state(state)
    assert len(list(iterator)) == 1


def test_programs_of_too_many_shapes_are_dropped(monkeypatch, caplog):
    monkeypatch.setattr("tpudist.run.step.MAX_SHAPES", 3)
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        seen = tpudist.Variable(0.0)

    def step(batch):
        total = a_step_over_buckets(batch)
        seen.assign_add(total)
        return total

    batches = make_batches([(4, n) for n in (1, 2, 3, 4, 5, 1)])
    with caplog.at_level(logging.WARNING, "tpudist.compile"):
        found = [
            float(strategy.run(step, (x,)))
            for x in strategy.experimental_distribute_dataset(batches)
        ]
    np.testing.assert_allclose(found, sums_of(batches), rtol=1e-4)
    assert float(seen) == pytest.approx(sum(found), rel=1e-4)
    assert "more than 3 shapes" in caplog.text
