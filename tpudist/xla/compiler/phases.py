"""Measures how long each phase of a compile takes, for `tpudist.compile_log()`.

A phase is a block of code under `measure`, or a step of JAX that it reports at its end. A phase
inside another one counts only as itself, so the seconds of all phases add up to at most the total.
"""

import collections
import contextlib
import enum
import functools
import threading
import time
from collections.abc import Iterator

import jax


class Phase(enum.StrEnum):
    """A part of the time between a call and the dispatch of its new program."""

    TRACE = "trace"
    """Calls of the user's function with abstract values, also for other numbers of rows."""
    PROOFS = "proofs"
    """Proofs and warnings about the trace."""
    ROWS = "rows"
    """Programs for partial batches."""
    LOWERING = "lowering"
    """Translation of the traced program into the compiler's input."""
    XLA = "XLA"
    """XLA's work, or loading a program from its cache."""


_OF_EVENTS = {
    "/jax/core/compile/jaxpr_to_mlir_module_duration": Phase.LOWERING,
    "/jax/core/compile/backend_compile_duration": Phase.XLA,
}
# A trace compiles small programs for the constants that it computes, each of which is a span.
_MAX_SPANS = 10_000
_Span = tuple[float, float, Phase]  # begin and end by `time.perf_counter`


class _Spans(threading.local):
    """The phases that have ended in one thread, since the last call of `take`."""

    def __init__(self):
        self.ended: collections.deque[_Span] = collections.deque(maxlen=_MAX_SPANS)


_spans = _Spans()


@contextlib.contextmanager
def measure(phase: Phase) -> Iterator[None]:
    """Counts the time of a block, or of a decorated function, as `phase`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _spans.ended.append((start, time.perf_counter(), phase))


def take(start: float) -> dict[str, float]:
    """Returns the wall seconds of each phase in this thread since `start`, and forgets them.

    Phases of calls that failed or did not compile began before `start`, and do not count.
    """
    spans = sorted((x for x in _spans.ended if x[0] >= start), key=lambda x: (x[0], -x[1]))
    _spans.ended.clear()
    seconds = dict.fromkeys(map(str, Phase), 0.0)
    around: list[_Span] = []
    for begin, end, phase in spans:
        while around and around[-1][1] <= begin:
            around.pop()
        if around:
            # JAX reports a duration, so a span may seem to end slightly after the one around it.
            end = min(end, around[-1][1])
            seconds[around[-1][2]] -= end - begin
        seconds[phase] += end - begin
        around.append((begin, end, phase))
    return seconds


@functools.cache
def listen() -> None:
    """Starts to measure the steps of JAX; further calls do nothing."""

    def on_event(event: str, duration_secs: float, **_) -> None:
        if event in _OF_EVENTS:
            now = time.perf_counter()
            _spans.ended.append((now - duration_secs, now, _OF_EVENTS[event]))

    jax.monitoring.register_event_duration_secs_listener(on_event)
