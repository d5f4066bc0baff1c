"""Whether JAX is tracing here, and what is a part of a trace."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh


def trace_state() -> Any:
    """A token of the innermost JAX trace, equal to those taken in the same trace only."""
    return core.get_opaque_trace_state(convention="tpudist")


_OUTSIDE = trace_state()


def is_eager() -> bool:
    """Whether operations run at once, and are not recorded by a JAX transformation."""
    return trace_state() == _OUTSIDE


@contextlib.contextmanager
def run_eagerly() -> Iterator[None]:
    """Runs operations on concrete values at once, also in the midst of a trace."""
    with contextlib.ExitStack() as stack:
        if not is_eager():
            # In a replica function the mesh is manual, and concrete arrays cannot be on it.
            stack.enter_context(jax.sharding.use_abstract_mesh(_NO_MESH))
        stack.enter_context(jax.ensure_compile_time_eval())
        yield


_NO_MESH = AbstractMesh((), ())


def is_traced(value: Any) -> bool:
    """Whether a value is one that JAX traces, and not a concrete one."""
    return isinstance(value, Tracer)
