"""Detects whether JAX is tracing, and computes concrete values during a trace."""

import concurrent.futures
import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh

from tpudist.xla import internals

_NO_MESH = AbstractMesh((), ())


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


def is_traced(value: object) -> bool:
    """Whether a value is traced by JAX, and not concrete."""
    return isinstance(value, Tracer)
