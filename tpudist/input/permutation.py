"""Shuffles any number of rows in constant memory: computes only those of an order that are read.

An order is a function of (seed, epoch, number of rows), and the same on every machine. States of
iterators depend on it, so another order needs a new version of states; see `iterator_state`.

A `Permutation` uses integer arithmetic and streams of `SeedSequence`, which NumPy guarantees. The
method `permutation` of a generator is not guaranteed. It is the same from NumPy 2.0 to 2.5, and a
test would find another one.
"""

import math
from typing import Protocol

import numpy as np

# Up to this many rows, an order is an array: 512 KiB, in about 1 ms. It is then exactly uniform.
MAX_ROWS_IN_MEMORY = 1 << 16
_MAX_PART_IN_MEMORY = 1 << 12  # parts are many, and may be small: a network of few rows is uneven
# With 4 rounds, rows that share a digit are found by their number (28 standard deviations at 10^6
# rows), with 6 they are not. A round costs about 2 ns per row.
_KEYS = 8, np.uint64
# Rows that are computed at a time. Each of 100 operations costs 0.6 us plus 0.2 ns per row, so more
# rows gain little; and the memory for these fits in a cache.
_BLOCK_ROWS = 1 << 13

# The constants of SplitMix64 (Steele, Lea and Flood 2014).
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27)
_HALF = np.uint64(32)


class Order(Protocol):
    """The row at each position of an epoch. An array is an order, too."""

    def __getitem__(self, positions: slice | np.ndarray, /) -> np.ndarray:
        """Returns the rows at `positions`; a slice has no step."""
        ...


class Permutation:
    """A permutation of 0..n-1 that stores no rows; index it with positions, like an array.

    It is a Feistel network of two digits (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"). With a = ceil(sqrt(n)) and b = ceil(n / a), position x has the digits x // b and
    x % b. A round adds a pseudorandom function of one digit to the other one, modulo a or b. So a
    round has an inverse. Therefore the network has one, too: it permutes 0..ab-1.

    There, fewer than a numbers are n or more. A position whose result is one of these goes through
    the network again, until the result is less than n. That ends: the numbers through which it goes
    are a cycle of a permutation, and the cycle returns to the position, which is less than n.

    Args:
        num_rows: n, from 1 to 2^63 - 1.
        keys: The key of each round, an even number of uint64.
    """

    def __init__(self, num_rows: int, keys: np.ndarray):
        assert 0 < num_rows < 1 << 63, num_rows
        assert len(keys) % 2 == 0, keys
        self._num_rows = num_rows
        # Both fit in 32 bits, so that no product or sum below exceeds 64 bits.
        high = math.isqrt(num_rows - 1) + 1
        self._radices = np.uint64(high), np.uint64(-(-num_rows // high))
        self._keys = list(keys)
        # The block of the last read: its first position, and its rows. Threads may replace it at
        # any time, so it is one value.
        self._block: tuple[int, np.ndarray] = (0, np.zeros(0, np.int64))

    def __reduce__(self) -> tuple[type["Permutation"], tuple[int, np.ndarray]]:
        """Copies without the block: the copy of a read-only array can be written to."""
        return Permutation, (self._num_rows, np.array(self._keys, np.uint64))

    def __len__(self) -> int:
        """Number of rows."""
        return self._num_rows

    def __getitem__(self, positions: slice | np.ndarray) -> np.ndarray:
        """Returns the rows at `positions`, int64 of the same shape; a slice has no step."""
        if isinstance(positions, slice):
            start, stop, step = positions.indices(self._num_rows)
            assert step == 1, positions
            if 2 * (stop - start) > _BLOCK_ROWS or stop <= start:
                return self._compute(np.arange(start, stop))
            block_start, rows = self._block_with(start, stop)
            return rows[start - block_start : stop - block_start]
        if not positions.size:
            return np.zeros(positions.shape, np.int64)
        start, stop = int(positions.min()), int(positions.max()) + 1
        assert 0 <= start < stop <= self._num_rows, (start, stop, self._num_rows)
        if 2 * (stop - start) > _BLOCK_ROWS:
            return self._compute(positions.reshape(-1)).reshape(positions.shape)
        block_start, rows = self._block_with(start, stop)
        return rows[positions - block_start]

    def _block_with(self, start: int, stop: int) -> tuple[int, np.ndarray]:
        """Returns a block with these positions. Batches follow each other, so it has later ones."""
        block_start, rows = block = self._block
        if not block_start <= start < stop <= block_start + len(rows):
            end = min(start + _BLOCK_ROWS, self._num_rows)
            block = self._block = start, self._compute(np.arange(start, end))
            block[1].flags.writeable = False  # readers receive views
        return block

    def _compute(self, positions: np.ndarray) -> np.ndarray:
        """Returns the rows at `positions`, `[k]`, in new memory."""
        rows = positions.astype(np.uint64)
        for i in range(0, len(rows), _BLOCK_ROWS):
            self._permute(rows[i : i + _BLOCK_ROWS])
        return rows.view(np.int64)

    def _permute(self, numbers: np.ndarray) -> None:
        """Replaces each of the numbers, uint64 `[k]`, by its row."""
        high_radix, low_radix = self._radices
        high, low = np.empty_like(numbers), numbers
        np.floor_divide(numbers, low_radix, out=high)
        buffers = np.empty_like(numbers), np.empty_like(numbers)
        low -= np.multiply(high, low_radix, out=buffers[0])
        for first_key, second_key in zip(self._keys[::2], self._keys[1::2], strict=True):
            _add_round(high, low, first_key, high_radix, *buffers)
            _add_round(low, high, second_key, low_radix, *buffers)
        high *= low_radix
        numbers += high
        outside = np.flatnonzero(numbers >= np.uint64(self._num_rows))
        if len(outside):
            again = numbers[outside]
            self._permute(again)
            numbers[outside] = again


def _add_round(
    target: np.ndarray,
    source: np.ndarray,
    key: np.uint64,
    radix: np.uint64,
    mixed: np.ndarray,
    shifted: np.ndarray,
) -> None:
    """Adds a pseudorandom function of `source` to `target`, modulo `radix`; both are digits.

    The function is output `source` of the SplitMix64 generator with the seed `key`, without its
    last step, which changes the lower bits. Its upper half, times the radix, has the upper half
    0..radix-1. `mixed` and `shifted` are memory for results.
    """
    np.multiply(source, _INCREMENT, out=mixed)
    mixed += key
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        np.right_shift(mixed, shift, out=shifted)
        mixed ^= shifted
        mixed *= factor
    mixed >>= _HALF
    mixed *= radix
    mixed >>= _HALF
    target += mixed
    # Without a division: if the sum is less than the radix, the difference wraps to a larger one.
    np.subtract(target, radix, out=mixed)
    np.minimum(target, mixed, out=target)


def shuffle(num_rows: int, seed: int, epoch: int) -> Order:
    """Returns the order of `num_rows` rows in an epoch, pseudorandom in all three numbers."""
    if num_rows <= MAX_ROWS_IN_MEMORY:
        return generator(seed, epoch).permutation(num_rows)
    return Permutation(num_rows, _seeds(num_rows, seed, epoch).generate_state(*_KEYS))


def shuffle_part(num_rows: int, seed: int, epoch: int, part: tuple[int, ...]) -> Order:
    """Returns the order of one of several parts of the rows, such as a file.

    Args:
        num_rows: Number of rows of the part.
        seed: Seed of the shuffle.
        epoch: Number of the epoch.
        part: Numbers from 0 to 2^32 - 1 that name the part; at least one.
    """
    seeds = _seeds(num_rows, seed, epoch, part)
    if num_rows <= _MAX_PART_IN_MEMORY:
        return np.argsort(seeds.generate_state(num_rows, np.uint64), kind="stable")
    return Permutation(num_rows, seeds.generate_state(*_KEYS))


# `SeedSequence` joins the words of 32 bits of its numbers. So [2^32, 0] and [0, 1] are equal, and a
# seed has only its lowest word there. The other words follow in the spawn key, which no seed below
# 2^32 has. After the words of a number of rows or of an example comes a word that tells apart the
# uses: 0 for a random transform, more for a shuffle.


def _words(number: int) -> tuple[int, ...]:
    """Returns the words of 32 bits of a number, lowest first; none for 0."""
    words = []
    while number:
        words.append(number & 0xFFFFFFFF)
        number >>= 32
    return tuple(words)


def _seeds(
    num_rows: int, seed: int, epoch: int, part: tuple[int, ...] = ()
) -> np.random.SeedSequence:
    low, high = seed & 0xFFFFFFFF, _words(seed >> 32)
    key = (num_rows & 0xFFFFFFFF, num_rows >> 32, 1 + len(high), *high, *part)
    return np.random.SeedSequence([low, epoch], spawn_key=key)


def seeds_of_example(seed: int, epoch: int, number: int) -> np.random.SeedSequence:
    """Returns the seeds of the random transform of an example."""
    # The number is a spawn key, and not a third seed: [seed, epoch, 0] would draw the same numbers
    # as [seed, epoch], which shuffles the epoch.
    low, high = seed & 0xFFFFFFFF, _words(seed >> 32)
    key = (number & 0xFFFFFFFF, number >> 32, 0, *high) if high else (number,)
    return np.random.SeedSequence([low, epoch], spawn_key=key)


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Returns the generator of an epoch: NumPy's default one, by name, as NumPy may replace it."""
    seeds = np.random.SeedSequence([seed & 0xFFFFFFFF, epoch], spawn_key=_words(seed >> 32))
    return np.random.Generator(np.random.PCG64(seeds))


def old_generator(seed: int, epoch: int) -> np.random.Generator:
    """Returns the generator of an epoch for states of version 1."""
    return np.random.Generator(np.random.PCG64([seed, epoch]))


def shuffle_in_memory(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Returns an order as an array, which states of version 1 have for any number of rows."""
    return old_generator(seed, epoch).permutation(num_rows)
