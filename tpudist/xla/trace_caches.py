"""Controls which programs share JAX's caches of traces.

JAX traces an inner function (under `jax.jit`, or the body of a loop) once for all programs that
call it. If its Python code has side effects, such as the assignment of a Variable, it must run in
each program.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import jax

from tpudist.xla import internals

_numbers = itertools.count(1)


class _CachesOfThread(threading.local):
    """The key of the caches that the programs of a thread share."""

    def __init__(self):
        self.key = next(_numbers)


_thread = _CachesOfThread()
# A setting of JAX, whose value is part of the key of the caches: None for the caches of all
# programs, `_thread.key` for those of this thread's programs, an unused number for empty caches.
# Created at import, because a new setting invalidates all existing traces. None if this JAX has no
# such settings; then all programs share their caches.
_KEY = internals.make_key_of_trace_caches()


def separate() -> contextlib.AbstractContextManager[None]:
    """Makes JAX trace all functions again, and shares these traces with no other program.

    Raises:
        RuntimeError: If this JAX does not allow it.
    """
    if _KEY is None:
        raise RuntimeError(
            "A Variable is assigned inside a nested transformation (jax.grad, lax.scan), or a "
            "batch is partial. tpudist must then trace a program apart from others, which jax "
            f"{jax.__version__} does not allow. Install a jax that tpudist supports: see "
            "CONTRIBUTING.md."
        )
    return _use(next(_numbers))


def share_in_thread() -> contextlib.AbstractContextManager[None]:
    """Lets the programs that this thread traces share traces, but with no others, until `renew`."""
    key = None if _KEY is None else _KEY.value
    return _use(_thread.key if key is None else key)


def share_with_all() -> contextlib.AbstractContextManager[None]:
    """Uses the caches of all programs again, inside `separate` or `share_in_thread`."""
    return _use(None)


@contextlib.contextmanager
def _use(key: int | None) -> Iterator[None]:
    if _KEY is None:
        yield
        return
    before = _KEY.swap_local(key)
    try:
        yield
    finally:
        _KEY.set_local(before)


def renew() -> None:
    """Continues the current context with empty caches."""
    if _KEY is not None:
        _KEY.set_local(next(_numbers))


def drop_shared() -> None:
    """Drops the traces that this thread's programs share; one contains a value of this trace."""
    _thread.key = next(_numbers)
