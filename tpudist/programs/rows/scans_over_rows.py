"""`jax.lax.associative_scan` over rows, whose operations are others for each number of rows.

It halves its elements again and again, so that no two numbers of rows need have one structure. What
it computes is what a scan from the first to the last element does, which has one structure for all
of them. So where traces differ, and a call of it has other lengths in them, it is traced as such a
scan: exact but for rounding, with as many turns as there are rows.

Calls are seen where they are made, as `jax.lax.associative_scan(...)`, in the traces that are
labelled and in no others: a function that has it under a name of its own is refused as before.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.array_types import PyTree

_lock = threading.RLock()


class Scans:
    """The calls of `jax.lax.associative_scan` in several traces of one function."""

    def __init__(self):
        """None is known to be over rows."""
        self._over_rows: frozenset[int] = frozenset()
        self._lengths: dict[Any, list[int]] = {}

    @contextlib.contextmanager
    def watch(self, key: Any) -> Iterator[None]:
        """Notes the calls of this thread, and makes those over rows a scan in order.

        Args:
            key: Names the trace.
        """
        lengths = self._lengths[key] = []
        thread = threading.get_ident()

        # Programs are traced one at a time where rows are followed; other threads go past it.
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
        """Learns which calls have other lengths in other traces; whether there are new ones."""
        given = [lengths for lengths in self._lengths.values() if lengths]
        if len({len(lengths) for lengths in given}) != 1:
            return False
        calls = enumerate(zip(*given, strict=True))
        found = frozenset(i for i, lengths in calls if len(set(lengths)) > 1)
        is_new = not found <= self._over_rows
        self._over_rows |= found
        self._lengths.clear()
        return is_new


def scan_in_order(fn: Callable, elems: PyTree, reverse: bool, axis: int) -> PyTree:
    """What `jax.lax.associative_scan` gives, one element after the other."""
    axis %= jnp.ndim(jax.tree.leaves(elems)[0])
    xs = jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), axis, 0), elems)

    def combine(a: PyTree, b: PyTree) -> PyTree:
        both = [jax.tree.map(lambda x: jnp.expand_dims(x, axis), x) for x in (a, b)]
        joined = jax.tree.map(lambda x: jnp.squeeze(x, axis), fn(*both))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), joined, b)

    def turn(carry: tuple[jax.Array, PyTree], x: PyTree) -> tuple[Any, PyTree]:
        is_first, before = carry
        # A branch and no select: `fn` of what is before the first may be NaN, and its gradient.
        joined = jax.lax.cond(is_first, lambda a, b: b, combine, before, x)
        return (jnp.zeros_like(is_first), joined), joined

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), xs)
    _, ys = jax.lax.scan(turn, (jnp.asarray(True), nothing), xs, reverse=reverse)
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, axis), ys)
