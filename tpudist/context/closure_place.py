"""Which closure a thread runs: a function that a coordinator has scheduled on a worker."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

_here = threading.local()


@dataclasses.dataclass(frozen=True)
class ClosurePlace:
    """Where a scheduled function runs.

    Attributes:
        worker: The number of the worker.
        closure: The number of the closure; None where one makes something on its worker.
        session: What the worker keeps for the strategy that schedules: `ps.worker_session`; None
            if there is no such strategy.
        state: What the closure has read and changed of what servers hold; None if there are none.
    """

    worker: int
    closure: int | None
    session: Any = None
    state: Any = None


@contextlib.contextmanager
def enter_closure(place: ClosurePlace) -> Iterator[ClosurePlace]:
    """This thread runs a closure in the `with` block."""
    before = current_place()
    _here.place = place
    try:
        yield place
    finally:
        _here.place = before


def current_place() -> ClosurePlace | None:
    """Where this thread runs a scheduled function; None outside of them."""
    return getattr(_here, "place", None)
