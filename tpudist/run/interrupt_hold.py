"""Ctrl-C in a step: held from the dispatch until the new state is written back.

A program overwrites the old state in place. A KeyboardInterrupt between its start and the writing
back of its results would leave models and Variables with arrays that are deleted, and the new ones
in nobody's hands: for a notebook's stop button that was more than half of all interruptions.
"""

# What `signal` wraps in enums, which takes 20 us a step where the caches are cold.
import _signal  # pyright: ignore[reportMissingImports]
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

_main_thread = threading.main_thread().ident
# Set where nothing is lost: while the user's function is traced, which may take long.
_nothing_to_lose: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tpudist.nothing_to_lose", default=False
)


NO_HOLD = contextlib.nullcontext()
"""For a program that takes no state away."""


class InterruptHold:
    """In the `with` block SIGINT waits; at its end it does what it would have done.

    Python handles signals in the main thread, so in others there is nothing to hold. Nor where the
    handler is none of Python's: it raises nothing here.
    """

    __slots__ = ("_held", "_previous")

    def __init__(self):
        """Holds nothing yet."""
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        """Takes over the signal."""
        if threading.get_ident() != _main_thread:
            return
        previous = _signal.getsignal(_signal.SIGINT)
        if callable(previous):
            # Known before it is replaced: the new handler may be called at once.
            self._previous = previous
            _signal.signal(_signal.SIGINT, self._hold)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives the signal back, and hands on one that has come."""
        if self._previous is not None:
            _signal.signal(_signal.SIGINT, self._previous)
            if self._held is not None:
                self._previous(*self._held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._previous is not None and _nothing_to_lose.get():
            self._previous(number, frame)
        else:
            self._held = number, frame


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """In the `with` block, inside of a hold, SIGINT is handled at once."""
    token = _nothing_to_lose.set(True)
    try:
        yield
    finally:
        _nothing_to_lose.reset(token)
