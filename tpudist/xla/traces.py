"""Whether JAX is tracing here, and what is a part of a trace."""

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
    """A token of the innermost JAX trace, equal to those taken in the same trace only."""
    return core.get_opaque_trace_state(convention="tpudist")


def settings() -> tuple[Any, ...]:
    """The values of JAX's settings now, as far as they change what a trace gives."""
    return internals.settings_of_traces()


# A first use in a traced function imports this module there. Each thread begins outside of traces.
with concurrent.futures.ThreadPoolExecutor(1) as _thread:
    _OUTSIDE = _thread.submit(trace_state).result()


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
            # JAX compares what several processes place by a program, which needs a clean state.
            stack.enter_context(internals.leave_axes())
        stack.enter_context(jax.ensure_compile_time_eval())
        yield


@contextlib.contextmanager
def separate_caches(now: bool = True) -> Iterator[None]:
    """Lets JAX trace all functions anew, and leave none of it for later traces.

    JAX traces a function of a module (one under `jax.jit`, the body of a loop) once for all the
    programs that call it. Python code in it that does more than return something must run in each.

    Args:
        now: Whether from the start, or only from when `renew_caches` is called. Until then the
            programs that a thread traces within this share what JAX has traced, but for those that
            have called `spoil_caches`.
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
    common = _caches.key if _KEY.value is None else _KEY.value
    before = _KEY.swap_local(next(_numbers) if now else common)
    try:
        yield
    finally:
        _KEY.set_local(before)


@contextlib.contextmanager
def common_caches() -> Iterator[None]:
    """Uses, within `separate_caches`, what all programs share again."""
    if _KEY is None:
        yield
        return
    before = _KEY.swap_local(None)
    try:
        yield
    finally:
        _KEY.set_local(before)


def renew_caches() -> None:
    """Forgets what has been traced within `separate_caches`."""
    if _KEY is not None:
        _KEY.set_local(next(_numbers))


def spoil_caches() -> None:
    """Leaves nothing that is traced here for later traces: it has a value of this one in it."""
    _caches.key = next(_numbers)


class _CachesOfThread(threading.local):
    """The key of what the programs that a thread traces share."""

    def __init__(self):
        self.key = next(_numbers)


# Made when this is imported: later it would have JAX trace anew what it knows already.
_KEY = internals.make_key_of_trace_caches()
_numbers = itertools.count(1)
_caches = _CachesOfThread()
_NO_MESH = AbstractMesh((), ())


def is_traced(value: Any) -> bool:
    """Whether a value is one that JAX traces, and not a concrete one."""
    return isinstance(value, Tracer)
