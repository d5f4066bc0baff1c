"""The closure that runs here: a function that a coordinator has scheduled on a worker.

The packages below `coordinator` ask it, for example to send reads of Variables to servers.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


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


# A context variable, as in `stack`: the threads of eager replicas belong to the closure, too.
_place: contextvars.ContextVar[ClosurePlace | None] = contextvars.ContextVar(
    "tpudist.closure_place", default=None
)


@contextlib.contextmanager
def enter_closure(place: ClosurePlace) -> Iterator[ClosurePlace]:
    """Makes `place` the current one in the `with` block."""
    token = _place.set(place)
    try:
        yield place
    finally:
        _place.reset(token)


def current_place() -> ClosurePlace | None:
    """Returns the place of the closure that runs here; None outside of closures."""
    return _place.get()
