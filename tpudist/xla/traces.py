"""Detects whether JAX is tracing, and controls what its trace caches share."""

import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh

from tpudist.xla import internals


def trace_state() -> Any:
    """Returns a token of the innermost JAX trace, equal only to tokens from the same trace."""
    return core.get_opaque_trace_state(convention="tpudist")


def settings() -> tuple[Any, ...]:
    """Returns the current values of JAX's settings that affect a trace."""
    return internals.settings_of_traces()


# The token outside of all traces. This module may be imported inside a trace, but a new thread
# always starts outside.
with concurrent.futures.ThreadPoolExecutor(1) as _thread:
    _OUTSIDE = _thread.submit(trace_state).result()


def is_eager() -> bool:
    """Whether operations run immediately, and no JAX transformation records them."""
    return trace_state() == _OUTSIDE


@contextlib.contextmanager
def run_eagerly() -> Iterator[None]:
    """Runs operations on concrete values immediately, even during a trace."""
    with contextlib.ExitStack() as stack:
        if not is_eager():
            # In a replica function the mesh is manual, and concrete arrays cannot be on it.
            stack.enter_context(jax.sharding.use_abstract_mesh(_NO_MESH))
            # JAX compares a value that several processes place by running a program, which fails
            # while axes have names.
            stack.enter_context(internals.leave_axes())
        stack.enter_context(jax.ensure_compile_time_eval())
        yield


@contextlib.contextmanager
def separate_caches(now: bool = True) -> Iterator[None]:
    """Makes JAX trace all functions again, without sharing these traces with other programs.

    JAX traces an inner function (under `jax.jit`, or the body of a loop) once for all programs that
    call it. If its Python code has side effects, it must run in each program.

    Args:
        now: Whether to separate the caches immediately, or only after `renew_caches`. Until then,
            the programs that a thread traces in this context share their traces with each other,
            except after `spoil_caches`.
    """
    if _KEY is None and now:
        raise RuntimeError(
            "A Variable is assigned inside a nested transformation (jax.grad, lax.scan), or a "
            "batch is partial. tpudist must then trace a program apart from others, which jax "
            f"{jax.__version__} does not allow. Install a jax that tpudist supports: see "
            "CONTRIBUTING.md."
        )
    if _KEY is None:
        yield
        return
    # The value of `_KEY` is part of the key of JAX's caches. An unused number means empty caches.
    # None means JAX's usual ones, and `_caches.key` those of this thread's programs.
    common = _caches.key if _KEY.value is None else _KEY.value
    before = _KEY.swap_local(next(_numbers) if now else common)
    try:
        yield
    finally:
        _KEY.set_local(before)


@contextlib.contextmanager
def common_caches() -> Iterator[None]:
    """Uses the caches of all programs again, inside `separate_caches`."""
    if _KEY is None:
        yield
        return
    before = _KEY.swap_local(None)
    try:
        yield
    finally:
        _KEY.set_local(before)


def renew_caches() -> None:
    """Drops all traces of the current `separate_caches` context."""
    if _KEY is not None:
        _KEY.set_local(next(_numbers))


def spoil_caches() -> None:
    """Drops this thread's shared traces, because one of them contains a value of this trace."""
    _caches.key = next(_numbers)


class _CachesOfThread(threading.local):
    """The value of `_KEY` for the programs that a thread traces."""

    def __init__(self):
        self.key = next(_numbers)


# Created at import, because a new setting invalidates all existing traces.
_KEY = internals.make_key_of_trace_caches()
_numbers = itertools.count(1)
_caches = _CachesOfThread()
_NO_MESH = AbstractMesh((), ())


def is_traced(value: object) -> bool:
    """Whether a value is traced by JAX, and not concrete."""
    return isinstance(value, Tracer)
