"""Orders of rows that are computed for the rows that are read: bijections, uniform, and fixed.

The bounds of the statistical tests were set before the first run: 5 standard deviations. About 400
figures are compared, so a fair shuffle would fail here with a probability of 0.001. The seeds are
fixed, so a test that passes once passes always.
"""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest

from tpudist.input import permutation
from tpudist.input.permutation import Permutation

N = 1_000_000
MAX_DEVIATION = 5


def make(num_rows, seed=0, epoch=0):
    """Returns a permutation also for few rows, for which `shuffle` returns an array."""
    words = (num_rows & 0xFFFFFFFF, num_rows >> 32, 1)
    seeds = np.random.SeedSequence([seed, epoch], spawn_key=words)
    return Permutation(num_rows, seeds.generate_state(8, np.uint64))


def every_row(order):
    return order[np.arange(len(order))]


def invert(order, rows):
    """Returns the positions of `rows`, by the rounds in the opposite order."""
    high_radix, low_radix = order._radices
    positions = []
    for row in rows.tolist():
        while True:
            high, low = (np.array([x], np.uint64) for x in divmod(row, int(low_radix)))
            for i, key in reversed(list(enumerate(order._keys))):
                target, source, radix = (low, high, low_radix) if i % 2 else (high, low, high_radix)
                function = np.zeros(1, np.uint64)
                permutation._add_round(function, source, key, radix, *np.empty((2, 1), np.uint64))
                target += radix - function
                target %= radix
            row = int(high[0]) * int(low_radix) + int(low[0])
            if row < len(order):
                break
        positions.append(row)
    return np.array(positions)


# Bijections.

SIZES = [*range(1, 70), 97, 127, 128, 129, 255, 256, 257, 997, 1023, 1024, 1025, 65_521, 65_535]
SIZES += [65_536, 65_537, 99_991, 99_999, 100_000, 2**17 - 1, 2**17, 2**17 + 1]


@pytest.mark.parametrize("seed", range(3))
def test_each_row_has_one_position(seed):
    for num_rows in SIZES:
        rows = np.sort(every_row(make(num_rows, seed)))
        assert np.array_equal(rows, np.arange(num_rows)), num_rows


@pytest.mark.parametrize(
    "num_rows", [10**9, 999_999_937, 2**32 - 1, 2**32, 2**32 + 1, 10**10, 2**53 + 1, 2**63 - 1]
)
def test_rows_of_many_lead_back_to_their_positions(num_rows):
    order = make(num_rows, seed=7)
    for start in (0, num_rows // 2, num_rows - 100):
        rows = order[start : start + 100]
        assert rows.min() >= 0
        assert rows.max() < num_rows
        assert invert(order, rows).tolist() == list(range(start, start + 100))


def test_a_row_does_not_depend_on_the_rows_that_are_read_with_it():
    order = make(200_003)
    whole = every_row(order)
    some = np.random.default_rng(0).integers(0, 200_003, (5, 7))
    close = np.arange(100_000, 100_040).reshape(4, 10)
    for positions in (some, close, close[::-1, ::-1], close + 9_000, np.array(5), np.zeros((0, 3))):
        positions = positions.astype(np.int64)
        found = make(200_003)[positions]
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, whole[positions])
        np.testing.assert_array_equal(order[positions], whole[positions])
    for start, stop in ((0, 1), (0, 10_000), (8_000, 8_500), (199_990, 300_000), (7, 7)):
        np.testing.assert_array_equal(order[start:stop], whole[start:stop])
        np.testing.assert_array_equal(make(200_003)[start:stop], whole[start:stop])


def test_readers_cannot_change_an_order():
    rows = make(100_000)[0:10]
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 1


# Growth: counts of computed rows and of bytes.


@pytest.mark.parametrize("num_rows", [10**6, 10**9, 10**10, 10**15])
def test_batches_in_sequence_cost_the_same_for_any_number_of_rows(monkeypatch, num_rows):
    computed = []
    compute = Permutation._permute

    def count(self, numbers):
        computed.append(len(numbers))
        compute(self, numbers)

    monkeypatch.setattr(Permutation, "_permute", count)
    order = permutation.shuffle(num_rows, 0, 0)
    start = num_rows // 2
    for i in range(100):
        assert len(order[start + 128 * i : start + 128 * (i + 1)]) == 128
    # 12,800 rows are in two blocks. Rows that go through the network again are few.
    assert [x for x in computed if x > 100] == [8192, 8192]
    assert sum(computed) < 2 * 8192 + 100
    stored = [x for x in vars(order).values() if isinstance(x, tuple)]
    assert sum(x.nbytes for pair in stored for x in pair if isinstance(x, np.ndarray)) == 8192 * 8


def test_a_large_read_computes_only_its_rows():
    order = permutation.shuffle(10**10, 0, 0)
    assert len(order[5:100_005]) == 100_000
    assert len(order[np.arange(0, 10**10, 10**8)]) == 100
    assert len(order._block[1]) == 0


# The same on every machine and in every release.


@pytest.mark.parametrize("num_rows", [50, 100_000])
def test_no_two_seeds_have_the_same_epoch(num_rows):
    """`SeedSequence` takes [2^32, 0] for [0, 1]."""
    seeds = [0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**64, 2**64 + 2**32, 2**96 + 1, 2**128]
    epochs = [0, 1, 2, 2**32 - 1]
    orders = {
        permutation.shuffle(num_rows, seed, epoch)[:50].tobytes()
        for seed in seeds
        for epoch in epochs
    }
    assert len(orders) == len(seeds) * len(epochs)
    parts = {
        permutation.shuffle_part(num_rows, seed, epoch, part)[:50].tobytes()
        for seed in seeds
        for epoch in epochs
        for part in ((0,), (1,), (1, 0), (1, 1))
    }
    assert len(parts) == 4 * len(orders)
    examples = {
        permutation.seeds_of_example(seed, epoch, number).generate_state(4).tobytes()
        for seed in seeds
        for epoch in epochs
        for number in (0, 1, 2**32, 2**32 + 1)
    }
    assert len(examples) == 4 * len(orders)


def test_smaller_seeds_have_the_orders_of_earlier_releases():
    for seed in (0, 5, 2**32 - 1):
        for epoch in (0, 3):
            old = permutation.shuffle_in_memory(50, seed, epoch)
            assert permutation.shuffle(50, seed, epoch).tolist() == old.tolist()
            known = np.random.SeedSequence([seed, epoch], spawn_key=(2**33 + 1,)).generate_state(4)
            found = permutation.seeds_of_example(seed, epoch, 2**33 + 1).generate_state(4)
            assert found.tolist() == known.tolist()


@pytest.mark.parametrize(
    "copy_of", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_views_of_a_copied_order_are_read_only(copy_of):
    order = permutation.shuffle(100_000, 0, 0)
    rows = order[10:20].tolist()
    for found in (order, copied := copy_of(order)):
        with pytest.raises(ValueError, match="read-only"):
            found[10:20][0] = 7
        assert found[10:20].tolist() == rows
    assert copied is not order
    assert len(copied) == 100_000


def test_orders_do_not_change():
    """Positions in data are stored with states: another order would lose and repeat examples."""
    assert permutation.shuffle(10, 0, 0).tolist() == FIXED["array"]
    assert permutation.shuffle(65_536, 3, 2)[:5].tolist() == FIXED["largest array"]
    assert permutation.shuffle(65_537, 3, 2)[:5].tolist() == FIXED["65,537 rows"]
    assert permutation.shuffle(10**10, 2**40, 5)[-5:].tolist() == FIXED["10^10 rows"]
    assert permutation.shuffle(2**63 - 1, 1, 0)[:5].tolist() == FIXED["2^63 - 1 rows"]


FIXED = {
    "array": [4, 6, 2, 7, 3, 5, 9, 0, 8, 1],
    "largest array": [2230, 6734, 41935, 54010, 2240],
    "65,537 rows": [57031, 540, 8584, 59303, 44711],
    "10^10 rows": [9383793824, 9980299888, 8273498044, 9116317044, 5594905597],
    "2^63 - 1 rows": [
        *(1175988131618708815, 4382552384433669456, 8536779818356447149),
        *(3515840440374798426, 8855675814919598194),
    ],
}


# Statistics: 5 standard deviations; see above.


def deviation_of_table(first, second, num_bins):
    """Returns the deviation of chi-squared of two labels in 0..num_bins-1 from independence."""
    table = np.bincount(first * num_bins + second, minlength=num_bins**2)
    table = table.reshape(num_bins, num_bins)
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    degrees = (num_bins - 1) ** 2
    return (((table - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


def deviation_of_counts(values, num_bins):
    """Returns the deviation of chi-squared of values in 0..num_bins-1 from equal counts."""
    counts = np.bincount(values, minlength=num_bins)
    expected = len(values) / num_bins
    return (((counts - expected) ** 2 / expected).sum() - num_bins + 1) / math.sqrt(
        2 * (num_bins - 1)
    )


def deviation_of_count(count, expected):
    return (count - expected) / math.sqrt(expected)  # of a Poisson distribution


# Blocks of consecutive numbers, and numbers with equal digits: N has the radices 1000 and 1000.
LABELS = {
    "blocks": lambda x: x // 10_000,
    "hundreds": lambda x: x // 100 % 100,
    "tens": lambda x: x // 10 % 100,
    "last digits": lambda x: x % 100,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("of_position", "of_row"), list(itertools.product(LABELS, repeat=2)))
def test_rows_do_not_depend_on_positions(seed, of_position, of_row):
    rows = every_row(make(N, seed))
    found = deviation_of_table(LABELS[of_position](np.arange(N)), LABELS[of_row](rows), 100)
    assert abs(found) < MAX_DEVIATION


LAGS = [1, 2, 999, 1000, 1001, 1024, 8192, 500_000]


def deviations_at(lag, rows):
    """Returns how the rows of positions at a distance deviate from independence."""
    first, second = rows[:-lag], rows[lag:]
    differences = (second - first) % N
    pairs = N - lag
    # Pairs of close rows, and of rows that share a digit. The latter differential is the first one
    # that reveals a network with too few rounds.
    close = np.count_nonzero((differences <= 1000) | (differences >= N - 1000))
    share_low = np.count_nonzero(differences % 1000 == 0)
    share_high = np.count_nonzero(first // 1000 == second // 1000)
    return {
        "differences in blocks": deviation_of_counts(differences // 1000, 1000),
        "last digits of differences": deviation_of_counts(differences % 1000, 1000),
        "blocks": deviation_of_table(first // 10_000, second // 10_000, 100),
        "last digits": deviation_of_table(first % 100, second % 100, 100),
        "close rows": deviation_of_count(close, 2000 * pairs / N),
        "equal low digits": deviation_of_count(share_low, 999 * pairs / N),
        "equal high digits": deviation_of_count(share_high, 999 * pairs / N),
    }


@pytest.mark.parametrize("lag", LAGS)
def test_rows_of_positions_at_a_distance_do_not_depend_on_each_other(lag):
    """Neighbors, and positions that share a digit."""
    found = deviations_at(lag, every_row(make(N, seed=3)))
    assert {name: x for name, x in found.items() if abs(x) >= MAX_DEVIATION} == {}


def test_neighbors_do_not_stay_neighbors():
    """Two of N pairs do, on average."""
    orders = [every_row(make(N, seed)) for seed in range(20)]
    kept = sum(np.count_nonzero(np.abs(np.diff(x)) == 1) for x in orders)
    assert abs(deviation_of_count(kept, 2 * 20)) < MAX_DEVIATION
    ascents = [np.count_nonzero(np.diff(x) > 0) for x in orders]
    for found in ascents:
        assert abs(found - (N - 1) / 2) / math.sqrt((N + 1) / 12) < MAX_DEVIATION


def test_epochs_and_seeds_do_not_depend_on_each_other():
    orders = {(s, e): every_row(make(N, s, e)) for s in range(2) for e in range(10)}
    pairs = [((s, e), (s, e + 1)) for s in range(2) for e in range(9)]
    pairs += [((0, e), (1, e)) for e in range(10)] + [((0, e + 1), (1, e)) for e in range(9)]
    equal = 0
    for first, second in pairs:
        a, b = orders[first], orders[second]
        assert abs(deviation_of_table(a // 10_000, b // 10_000, 100)) < MAX_DEVIATION
        assert abs(deviation_of_counts((a - b) % N // 1000, 1000)) < MAX_DEVIATION
        equal += np.count_nonzero(a == b)
    assert abs(deviation_of_count(equal, len(pairs))) < MAX_DEVIATION


def test_about_one_row_stays_where_it_is():
    """The number of fixed points has a Poisson distribution with mean 1."""
    positions = np.arange(70_000)
    counts = [np.count_nonzero(every_row(make(70_000, s)) == positions) for s in range(400)]
    found = np.bincount(np.minimum(counts, 4), minlength=5)
    share = [math.exp(-1) / math.factorial(k) for k in range(4)]
    expected = 400 * np.array([*share, 1 - sum(share)])
    chi_squared = ((found - expected) ** 2 / expected).sum()
    assert (chi_squared - 4) / math.sqrt(8) < MAX_DEVIATION


@pytest.mark.parametrize("num_rows", [65_537, N, 10**10])
def test_the_first_rows_are_uniform_over_seeds(num_rows):
    first = np.array([make(num_rows, seed)[np.arange(3)] for seed in range(5000)])
    bins = first * 20 // num_rows  # 10^10 * 20 fits
    for i, j in itertools.combinations(range(3), 2):
        assert abs(deviation_of_counts(bins[:, i] * 20 + bins[:, j], 400)) < MAX_DEVIATION
    assert abs(deviation_of_counts((first % 20).reshape(-1), 20)) < MAX_DEVIATION


SHUFFLES = {
    "seeds": lambda num_rows, i: permutation.shuffle(num_rows, i, 0),
    "epochs": lambda num_rows, i: permutation.shuffle(num_rows, 0, i),
    "parts": lambda num_rows, i: permutation.shuffle_part(num_rows, 0, 0, (1, i)),
}


@pytest.mark.parametrize("num_rows", [4, 5])
@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
def test_all_permutations_of_few_rows_are_as_frequent(shuffle, num_rows):
    count = math.factorial(num_rows)
    numbers = {x: i for i, x in enumerate(itertools.permutations(range(num_rows)))}
    orders = (shuffle(num_rows, i).tolist() for i in range(100 * count))
    found = np.array([numbers[tuple(x)] for x in orders])
    assert abs(deviation_of_counts(found, count)) < MAX_DEVIATION


@pytest.mark.parametrize("num_rows", [4096, 4097, 100_000])
def test_parts_do_not_depend_on_each_other(num_rows):
    """Files, whose orders have the same seed and epoch. The largest array has 4096 rows."""
    orders = [permutation.shuffle_part(num_rows, 0, 0, (1, i)) for i in range(40)]
    rows = [x[np.arange(num_rows)] for x in orders]
    assert all(np.array_equal(np.sort(x), np.arange(num_rows)) for x in rows)
    equal = sum(np.count_nonzero(a == b) for a, b in itertools.pairwise(rows))
    assert abs(deviation_of_count(equal, 39)) < MAX_DEVIATION
    for a, b in itertools.pairwise(rows):
        found = deviation_of_table(a * 10 // num_rows, b * 10 // num_rows, 10)
        assert abs(found) < MAX_DEVIATION


def test_a_network_with_four_rounds_fails_these_tests():
    """The bounds are useful only if a poor shuffle exceeds them."""
    order = make(N, seed=3)
    order._keys = order._keys[:4]
    rows = every_row(order)
    assert (
        max(abs(x) for lag in LAGS for x in deviations_at(lag, rows).values()) > 3 * MAX_DEVIATION
    )
