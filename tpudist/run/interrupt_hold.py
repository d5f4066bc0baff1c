"""Signals in a step: held from the dispatch until the new state is written back.

A program overwrites the old state in place. An exception of a signal handler between its start and
the writing back of its results would leave models and Variables with arrays that are deleted, and
the new ones in nobody's hands. Any handler may raise: Ctrl-C's KeyboardInterrupt, the TimeoutError
of an alarm, the SystemExit of a SIGTERM. So all signals wait whose handler is a Python function.
"""

# What `signal` wraps in enums, which takes 20 us a step where the caches are cold.
import _signal  # pyright: ignore[reportMissingImports]
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

_getsignal, _setsignal = _signal.getsignal, _signal.signal
_Handler = Callable[[int, FrameType | None], Any]

_main_thread = threading.main_thread().ident
# Set where nothing is lost: while the user's function is traced, which may take long.
_nothing_to_lose: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tpudist.nothing_to_lose", default=False
)
# Looked at in each step, for 1 us. Signals without handlers are left out, faults, which no Python
# function can handle, and the real-time signals, whose numbers are above 31.
_OTHERS = "KILL STOP ILL TRAP BUS FPE SEGV SYS STKFLT"
_NUMBERS = tuple(
    sorted(
        int(x)
        for x in signal.valid_signals()
        - {getattr(signal, f"SIG{name}", None) for name in _OTHERS.split()}
        if x < 32
    )
)
_known: tuple[tuple[Any, ...], dict[int, _Handler]] = ((), {})
"""The handlers of the last step, and those of them that are Python functions, by signal."""


NO_HOLD = contextlib.nullcontext()
"""For a program that takes no state away."""


class InterruptHold:
    """A `with` block in which signals wait; at its end their handlers are called.

    Python handles signals in the main thread, so in others there is nothing to hold. Nor where the
    handler is none of Python's: it raises nothing here.
    """

    __slots__ = ("_handlers", "_held")

    def __init__(self):
        """Holds nothing yet."""
        self._handlers: dict[int, _Handler] | None = None
        self._held: dict[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        """Takes over the signals."""
        if threading.get_ident() != _main_thread:
            return
        found = tuple(map(_getsignal, _NUMBERS))
        # Known before they are replaced: the new handler may be called at once.
        self._handlers = _known[1] if found == _known[0] else _find_functions(found)
        try:
            for number in self._handlers:
                _setsignal(number, self._hold)
        except BaseException:  # of a handler that has not been replaced yet
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives the signals back, and hands on the signals that have come."""
        if self._handlers:
            try:
                self._give_back([*self._handlers.items()])
            finally:
                if self._held:
                    self._hand_on(self._handlers, self._held)

    def _give_back(self, handlers: list[tuple[int, _Handler]]) -> None:
        """All of them, although a handler that is back already may raise."""
        try:
            while handlers:
                _setsignal(*handlers[-1])
                handlers.pop()
        finally:
            if handlers:
                self._give_back(handlers)

    def _hand_on(self, handlers: dict[int, _Handler], held: dict[int, FrameType | None]) -> None:
        """All of them, in their order, although a handler may raise."""
        number = next(iter(held))
        frame = held.pop(number)
        try:
            handlers[number](number, frame)
        finally:
            if held:
                self._hand_on(handlers, held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._handlers is not None and _nothing_to_lose.get():
            self._handlers[number](number, frame)
        elif self._held is None:
            self._held = {number: frame}
        else:
            self._held[number] = frame


def _find_functions(handlers: tuple[Any, ...]) -> dict[int, _Handler]:
    """The handlers that are Python functions, by signal; nobody changes it."""
    global _known
    found = zip(_NUMBERS, handlers, strict=True)
    _known = handlers, {number: x for number, x in found if callable(x)}
    return _known[1]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """In the `with` block, inside of a hold, signals are handled at once."""
    token = _nothing_to_lose.set(True)
    try:
        yield
    finally:
        _nothing_to_lose.reset(token)
