"""Delays signals in a step, from the dispatch until the new state is written back.

A program overwrites the old state in place. If a signal handler raised between the start of the
program and the write-back, models and Variables would keep deleted arrays, and the new arrays would
be lost. Any handler may raise: KeyboardInterrupt of Ctrl-C, TimeoutError of an alarm, SystemExit of
a SIGTERM. So all signals wait whose handler is a Python function.
"""

# The module behind `signal`, without its enums, which take 20 us a step when caches are cold.
import _signal  # pyright: ignore[reportMissingImports]
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_getsignal, _setsignal = _signal.getsignal, _signal.signal
_Handler = Callable[[int, FrameType | None], Any]

_main_thread = threading.main_thread().ident
# True while an exception loses nothing: while the user's function is traced, which may take long.
_is_interruptible: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tpudist.is_interruptible", default=False
)
# The signals to delay. Each step reads their handlers, in 1 us. Left out: KILL and STOP, which
# allow no handler; faults, which no Python function can handle; and real-time signals, whose
# numbers are above 31. The signals differ between platforms, so `signal` may lack some of these.
_EXCLUDED = "KILL STOP ILL TRAP BUS FPE SEGV SYS STKFLT"
_DELAYED = tuple(
    sorted(
        int(x)
        for x in signal.valid_signals()
        - {getattr(signal, f"SIG{name}", None) for name in _EXCLUDED.split()}
        if x < 32
    )
)
# The handlers at the last step, and those of them that are Python functions, by signal.
_cached: tuple[tuple[Any, ...], dict[int, _Handler]] = ((), {})


NO_HOLD = contextlib.nullcontext()
"""Takes the place of an `InterruptHold` for a program that overwrites no state."""


class InterruptHold:
    """A `with` block in which signals wait; their handlers are called at its end, once for each.

    Python handles signals in the main thread, so it does nothing in other threads. It leaves
    handlers alone that are not Python functions, because they cannot raise here.
    """

    __slots__ = ("_handlers", "_waiting")

    def __init__(self):
        self._handlers: dict[int, _Handler] | None = None
        self._waiting: dict[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        """Replaces the signal handlers."""
        if threading.get_ident() != _main_thread:
            return
        handlers = tuple(map(_getsignal, _DELAYED))
        # Set before the first one is replaced: the new handler may be called at once, and needs it.
        self._handlers = _cached[1] if handlers == _cached[0] else _find_functions(handlers)
        try:
            for number in self._handlers:
                _setsignal(number, self._hold)
        except BaseException:  # raised by a handler that has not been replaced yet
            self.__exit__(None, None, None)
            raise

    def __exit__(self, *_: object) -> None:
        """Restores the handlers, and calls those of the signals that have arrived."""
        if self._handlers:
            try:
                self._restore([*self._handlers.items()])
            finally:
                if self._waiting:
                    self._deliver(self._handlers, self._waiting)

    # Both methods below recurse in `finally`, so that they handle every signal even if a handler
    # raises. That may be a handler that was just restored, or a handler that they call.

    def _restore(self, handlers: list[tuple[int, _Handler]]) -> None:
        try:
            while handlers:
                _setsignal(*handlers[-1])
                handlers.pop()
        finally:
            if handlers:
                self._restore(handlers)

    def _deliver(self, handlers: dict[int, _Handler], waiting: dict[int, FrameType | None]) -> None:
        """Calls the handlers in the order in which the signals arrived first."""
        number = next(iter(waiting))
        frame = waiting.pop(number)
        try:
            handlers[number](number, frame)
        finally:
            if waiting:
                self._deliver(handlers, waiting)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        """Records a signal that arrives in the `with` block, or handles it if it may raise."""
        if self._handlers is not None and _is_interruptible.get():
            self._handlers[number](number, frame)
        elif self._waiting is None:
            self._waiting = {number: frame}
        else:
            self._waiting[number] = frame


def _find_functions(handlers: tuple[Any, ...]) -> dict[int, _Handler]:
    """Returns the handlers that are Python functions, by signal; callers do not change the dict."""
    global _cached
    pairs = zip(_DELAYED, handlers, strict=True)
    _cached = handlers, {number: x for number, x in pairs if callable(x)}
    return _cached[1]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handles signals at once in the `with` block, which is inside an `InterruptHold`."""
    token = _is_interruptible.set(True)
    try:
        yield
    finally:
        _is_interruptible.reset(token)
