"""The closure that this thread runs: a function that a coordinator has scheduled on a worker.

The packages below `coordinator` ask it, for example to send reads of Variables to servers.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any


class _ThreadState(threading.local):
    # A class attribute: a thread that has set none sees this default.
    place: "ClosurePlace | None" = None


_thread = _ThreadState()


@dataclasses.dataclass(frozen=True)
class ClosurePlace:
    """The worker and the closure of a scheduled function.

    Attributes:
        closure: Number of the closure; None if the worker creates a resource outside of a closure.
        session: Objects that the worker keeps for the scheduling strategy: `ps.worker_session`;
            None without such a strategy.
        state: Reads and changes of the values on servers by this closure; None without servers.
    """

    worker: int
    closure: int | None
    session: Any = None
    state: Any = None


@contextlib.contextmanager
def enter_closure(place: ClosurePlace) -> Iterator[ClosurePlace]:
    """Makes `place` the current one of this thread in the `with` block."""
    before = current_place()
    _thread.place = place
    try:
        yield place
    finally:
        _thread.place = before


def current_place() -> ClosurePlace | None:
    """Returns the place of the closure that this thread runs; None outside of closures."""
    return _thread.place
