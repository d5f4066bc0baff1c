import numpy as np
import pytest
from hypothesis import given, strategies as st

from tpudist.input import rows_of_replicas
from tpudist.input.rows_of_replicas import Assignment

batches = st.integers(1, 70).flatmap(
    lambda size: st.tuples(st.just(size), st.integers(1, size), st.integers(1, 12))
)


@pytest.mark.parametrize(
    ("global_batch", "num_replicas", "quotas"),
    [
        (8, 1, (8,)),
        (8, 2, (4, 4)),
        (8, 8, (1,) * 8),
        (9, 2, (5, 4)),
        (10, 4, (3, 3, 2, 2)),
        (3, 4, (1, 1, 1, 0)),
        (1, 2, (1, 0)),
    ],
)
def test_the_first_replicas_read_one_more_row_if_rows_do_not_divide(
    global_batch, num_replicas, quotas
):
    assert Assignment(global_batch, num_replicas).quotas == quotas


@pytest.mark.parametrize(
    ("num_rows", "global_batch", "num_replicas", "rows"),
    [
        (6, 8, 2, (4, 2)),  # the specification's example
        (6, 6, 4, (2, 2, 1, 1)),
        (6, 8, 4, (2, 2, 2, 0)),
        (8, 8, 2, (4, 4)),
        (1, 8, 4, (1, 0, 0, 0)),
        (9, 10, 4, (3, 3, 2, 1)),
        (5, 10, 4, (3, 2, 0, 0)),
    ],
)
def test_a_partial_batch_fills_the_first_replicas_first(num_rows, global_batch, num_replicas, rows):
    assert Assignment(global_batch, num_replicas).rows(num_rows) == rows


@pytest.mark.parametrize(
    ("num_rows", "global_batch", "num_replicas", "positions"),
    [
        (4, 4, 2, [[0, 1], [2, 3]]),
        (3, 4, 2, [[0, 1], [2, 2]]),
        (2, 4, 2, [[0, 1], [0, 0]]),
        (5, 5, 2, [[0, 1, 2], [3, 4, 4]]),
        (1, 6, 3, [[0, 0], [0, 0], [0, 0]]),
    ],
)
def test_padding_repeats_the_last_real_row_or_else_the_first_of_the_batch(
    num_rows, global_batch, num_replicas, positions
):
    split = Assignment(global_batch, num_replicas)
    assert split.positions(num_rows, range(num_replicas)).tolist() == positions


@given(batches)
def test_every_row_is_read_once_and_in_order(batch):
    global_batch, num_rows, num_replicas = batch
    split = Assignment(global_batch, num_replicas)
    positions = split.positions(num_rows, range(num_replicas))
    rows = split.rows(num_rows)
    real = [part[:count] for part, count in zip(positions, rows, strict=True)]
    np.testing.assert_array_equal(np.concatenate(real), np.arange(num_rows))
    assert positions.shape == (num_replicas, max(split.quotas))
    assert set(positions.flat) <= set(range(num_rows))


@given(batches)
def test_a_row_is_read_by_the_same_replica_for_any_number_of_rows(batch):
    """The replica of a row must not depend on the number of rows after it."""
    global_batch, num_rows, num_replicas = batch
    split = Assignment(global_batch, num_replicas)
    full, partial = split.rows(global_batch), split.rows(num_rows)
    assert full == split.quotas
    assert sum(full) == global_batch
    assert sum(partial) == num_rows
    for replica in range(num_replicas):
        start, count = split.start(replica), partial[replica]
        assert start == sum(full[:replica])
        assert count == 0 or partial[:replica] == full[:replica]


@given(batches)
def test_a_process_computes_the_same_rows_for_its_replicas_as_one_process(batch):
    global_batch, num_rows, num_replicas = batch
    split = Assignment(global_batch, num_replicas)
    whole = split.positions(num_rows, range(num_replicas))
    for replica in range(num_replicas):
        np.testing.assert_array_equal(split.positions(num_rows, [replica])[0], whole[replica])


@pytest.mark.parametrize(
    ("num_rows", "global_batch", "all_batches", "full_batches"),
    [(8, 8, 1, 1), (9, 8, 2, 1), (7, 8, 1, 0), (16, 8, 2, 2), (1, 1, 1, 1)],
)
def test_the_number_of_batches_counts_the_last_one_unless_it_is_dropped(
    num_rows, global_batch, all_batches, full_batches
):
    assert rows_of_replicas.num_batches(num_rows, global_batch, drop_remainder=False) == all_batches
    assert rows_of_replicas.num_batches(num_rows, global_batch, drop_remainder=True) == full_batches
