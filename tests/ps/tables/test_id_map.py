"""IdMap: a dict of rows for arbitrary ids; and shards of equal size."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tpudist.ps.tables import id_map
from tpudist.ps.tables.id_hash import as_ids, shard_of
from tpudist.ps.tables.id_map import IdMap

# Few enough to meet again, with those at both ends and with zero.
IDS = st.one_of(
    st.integers(-5, 5),
    st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 32, -(1 << 32)]),
    st.integers(0, 60).map(lambda i: i << 57),
)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "remove", "find"]), st.lists(IDS, max_size=40)))


@settings(max_examples=60)
@given(CALLS)
def test_id_map_behaves_like_a_dict_with_distinct_rows(calls):
    ids_to_rows, expected = IdMap(), {}
    for what, ids in calls:
        array = np.array(ids, np.int64)
        before = [expected.get(i, -1) for i in ids]
        if what == "add":
            rows = ids_to_rows.find_or_add(array).tolist()
            for i, row, old in zip(ids, rows, before, strict=True):
                assert old in (-1, row)
                assert expected.setdefault(i, row) == row
        elif what == "remove":
            assert ids_to_rows.remove(array).tolist() == before
            for i in ids:
                expected.pop(i, None)
        else:
            assert ids_to_rows.find(array).tolist() == before
        assert len(ids_to_rows) == len(expected) == len(set(expected.values()))
        found, rows = ids_to_rows.items()
        assert dict(zip(found.tolist(), rows.tolist(), strict=True)) == expected
        assert ids_to_rows.ids().tolist() == sorted(expected, key=expected.get)
        assert all(row < ids_to_rows.end_row for row in expected.values())


def test_many_ids_are_found_while_growing_and_after_removing_half():
    random = np.random.default_rng(0)
    ids = np.unique(random.integers(-(1 << 63), 1 << 63, 50_000))
    random.shuffle(ids)
    ids_to_rows = IdMap()
    for part in np.array_split(ids, 7):
        ids_to_rows.find_or_add(part)
    rows = ids_to_rows.find(ids)
    np.testing.assert_array_equal(np.sort(rows), np.arange(len(ids)))
    assert (ids_to_rows.find(ids + 1)[~np.isin(ids + 1, ids)] == -1).all()

    gone, kept = ids[::2], ids[1::2]
    np.testing.assert_array_equal(ids_to_rows.remove(gone), rows[::2])
    assert (ids_to_rows.find(gone) == -1).all()
    np.testing.assert_array_equal(ids_to_rows.find(kept), rows[1::2])
    again = ids_to_rows.find_or_add(gone - 1)
    assert ids_to_rows.end_row <= len(ids) + np.isin(gone - 1, kept).sum()
    np.testing.assert_array_equal(ids_to_rows.find(gone - 1), again)
    assert ids_to_rows.nbytes <= 17 * 4 * len(ids)


@pytest.mark.parametrize("start", [0, -3, (1 << 63) - 5000])
@pytest.mark.parametrize("step", [1, 1 << 20, 1 << 32, 0x9E3779B97F4A7C15])
def test_ids_at_equal_distances_do_not_cluster(start, step):
    """A search with a bad hash would probe all of them."""
    with np.errstate(over="ignore"):
        steps = np.arange(5000, dtype=np.uint64) * np.uint64(step)
        ids = (steps + np.uint64(start % (1 << 64))).view(np.int64)
    ids_to_rows = IdMap()
    rows = ids_to_rows.find_or_add(ids)
    np.testing.assert_array_equal(ids_to_rows.find(ids), rows)
    distance = (ids_to_rows._probe(ids)[1] - ids_to_rows._home(ids)) % len(ids_to_rows._slots)
    assert distance.max() < 200


def test_unsigned_and_signed_ids_with_equal_bits_are_equal():
    ids_to_rows = IdMap()
    rows = ids_to_rows.find_or_add(np.array([(1 << 64) - 1, 7], np.uint64))
    np.testing.assert_array_equal(ids_to_rows.find(np.array([-1, 7])), rows)
    np.testing.assert_array_equal(ids_to_rows.find(np.array([-1, 7], np.int8)), rows)
    np.testing.assert_array_equal(ids_to_rows.find([-1, 7]), rows)
    assert ids_to_rows.find([]).tolist() == ids_to_rows.find_or_add([]).tolist() == []
    assert ids_to_rows.remove([]).tolist() == []


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (np.ones(3), TypeError, "ids of table rows have dtype float64, but must be integers"),
        (["a"], TypeError, "ids of table rows have dtype <U1"),
        ([True], TypeError, "ids of table rows have dtype bool"),
        ([1 << 70], TypeError, "ids of table rows have dtype object"),
        (
            np.ones((2, 3), int),
            ValueError,
            r"ids of table rows have shape \[2, 3\], but must have one dim",
        ),
        (3, ValueError, r"ids of table rows have shape \[\]"),
    ],
)
def test_invalid_ids_raise_errors(ids, error, message):
    for call in (as_ids, IdMap().find, IdMap().find_or_add, IdMap().remove):
        with pytest.raises(error, match=message):
            call(ids)


def test_more_rows_than_numbers_raise_an_error(monkeypatch):
    ids_to_rows = IdMap()
    monkeypatch.setattr(id_map, "_MAX_ROWS", 3)
    ids_to_rows.find_or_add([5, 6])
    with pytest.raises(OverflowError, match="4 rows on one server: .* 32 bits. Use more servers"):
        ids_to_rows.find_or_add([6, 7, 8])
    assert ids_to_rows.ids().tolist() == [5, 6]


@pytest.mark.parametrize("num_shards", [1, 2, 5, 8, 1000])
@pytest.mark.parametrize("step", [1, 1000, 1 << 32])
def test_shards_have_equal_shares_of_the_ids(num_shards, step):
    shards = shard_of(np.arange(-50_000, 50_000) * step, num_shards)
    counts = np.bincount(shards, minlength=num_shards)
    mean = 100_000 / num_shards
    assert len(counts) == num_shards
    assert np.abs(counts - mean).max() < 6 * np.sqrt(mean) + 1


def test_shard_of_is_stable_across_versions():
    """Saved tables are divided by it."""
    ids = np.array([0, 1, -1, 123456789, -(1 << 63)])
    assert shard_of(ids, 1000).tolist() == [0, 704, 393, 560, 560]
    for num_shards in (0, -1, (1 << 31) + 1):
        with pytest.raises(ValueError, match=f"split over {num_shards} shards"):
            shard_of(ids, num_shards)
