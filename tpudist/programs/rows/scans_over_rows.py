"""Traces `jax.lax.associative_scan` over rows as a scan from the first to the last row.

`associative_scan` halves its elements again and again, so its operations differ for each number of
rows, and traces cannot be compared. A sequential scan computes the same, except for rounding, with
one structure for all numbers of rows and one iteration per row. `row_program` uses it when traces
differ and a call of `associative_scan` has different lengths in them.

Only calls by the name `jax.lax.associative_scan(...)` in labelled traces are replaced. A function
that imported it under another name still raises `RowsError`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.array_types import PyTree
from tpudist.programs.rows.row_sizes import Point

_lock = threading.RLock()  # a traced function may be traced for labels inside another one


class Scans:
    """The calls of `jax.lax.associative_scan` in several traces of one function."""

    def __init__(self):
        self._over_rows: frozenset[int] = frozenset()  # by their order in a trace
        self._lengths: dict[Point, list[int]] = {}

    @contextlib.contextmanager
    def watch(self, point: Point) -> Iterator[None]:
        """Records the calls in a trace for `point`, and replaces those over rows."""
        lengths = self._lengths[point] = []
        thread = threading.get_ident()

        # The function is replaced in JAX for all threads. The lock serializes labelled traces, and
        # the thread check passes the calls of all other threads on to JAX.
        with _lock:
            original = jax.lax.associative_scan

            def associative_scan(
                fn: Callable, elems: PyTree, reverse: bool = False, axis: int = 0
            ) -> PyTree:
                if threading.get_ident() != thread:
                    return original(fn, elems, reverse=reverse, axis=axis)
                lengths.append(jax.tree.leaves(elems)[0].shape[axis])
                if len(lengths) - 1 in self._over_rows:
                    return scan_in_order(fn, elems, reverse, axis)
                return original(fn, elems, reverse=reverse, axis=axis)

            jax.lax.associative_scan = associative_scan
            try:
                yield
            finally:
                jax.lax.associative_scan = original

    def find_over_rows(self) -> bool:
        """Finds calls whose length differs between traces; returns whether any of them is new.

        If none is, another try would make the same traces again.
        """
        traces = [lengths for lengths in self._lengths.values() if lengths]
        if len({len(lengths) for lengths in traces}) != 1:
            return False
        calls = enumerate(zip(*traces, strict=True))
        over_rows = frozenset(i for i, lengths in calls if len(set(lengths)) > 1)
        is_new = not over_rows <= self._over_rows
        self._over_rows |= over_rows
        self._lengths.clear()
        return is_new


def scan_in_order(fn: Callable, elems: PyTree, reverse: bool, axis: int) -> PyTree:
    """Returns the result of `jax.lax.associative_scan`, computed one element after the other."""
    axis %= jnp.ndim(jax.tree.leaves(elems)[0])
    xs = jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), axis, 0), elems)

    def combine(a: PyTree, b: PyTree) -> PyTree:
        both = [jax.tree.map(lambda x: jnp.expand_dims(x, axis), x) for x in (a, b)]
        joined = jax.tree.map(lambda x: jnp.squeeze(x, axis), fn(*both))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), joined, b)

    def step(carry: tuple[jax.Array, PyTree], x: PyTree) -> tuple[Any, PyTree]:
        is_first, before = carry
        # A branch, not a select: `fn` of the zeros before the first element may be NaN, and a
        # select would let that NaN into the gradient.
        joined = jax.lax.cond(is_first, lambda a, b: b, combine, before, x)
        return (jnp.zeros_like(is_first), joined), joined

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), xs)
    _, ys = jax.lax.scan(step, (jnp.asarray(True), zeros), xs, reverse=reverse)
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, axis), ys)
