"""SigtermListener: SIGTERM becomes a request, and the program decides when to end."""

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any, TypeAlias

from tpudist.processes.preemption_service import SigtermHandler

# Like the type of `signal.getsignal`: None is a handler that was not installed from Python.
_Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

_listeners: "weakref.WeakSet[SigtermListener]" = weakref.WeakSet()


def _close_all() -> None:
    for listener in list(_listeners):
        listener.close()


# A forked child has nothing to save, and `terminate()` of multiprocessing must end it.
os.register_at_fork(after_in_child=_close_all)


class SigtermListener:
    """Calls a function at each SIGTERM, which no longer ends the process until this is closed.

    A previous handler written in Python is also called, but a `SystemExit` that it raises is
    ignored, because the state must be saved first. JAX's handler is replaced: it only records the
    signal for functions that nobody calls here. Ctrl-C is not changed.

    Args:
        on_signal: Called in the main thread between two operations of Python. It must not take
            locks.

    Raises:
        ValueError: If this is not the main thread, where alone Python allows signal handlers.
    """

    def __init__(self, on_signal: Callable[[], None]):
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"Python handles SIGTERM only in the main thread, but this is thread "
                f"{threading.current_thread().name!r}. Create the object in the main thread, or "
                f"pass a termination_watcher_fn to TerminationConfig."
            )
        self._on_signal = on_signal
        self._is_open = True
        self._previous: _Handler = signal.signal(signal.SIGTERM, self._handle)
        _listeners.add(self)

    def close(self) -> None:
        """Restores the previous handler of SIGTERM, or forwards signals to it."""
        self._is_open = False
        if self._is_installed() and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous_handler())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous_handler()
        if not self._is_open:
            self._forward(previous, number, frame)
            return
        self._on_signal()
        # A `SigtermHandler` is for programs that do not handle SIGTERM.
        if callable(previous) and not isinstance(previous, SigtermHandler):
            with contextlib.suppress(SystemExit):  # the state must be saved first
                previous(number, frame)

    def _forward(self, previous: _Handler, number: int, frame: FrameType | None) -> None:
        """Behaves like the handler before this one.

        A closed listener stays installed if a later handler calls it, or if it was closed in
        another thread.
        """
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL and self._is_installed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _is_installed(self) -> bool:
        """Whether the signal calls this handler, and not a later one."""
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _previous_handler(self) -> "_Handler":
        """Returns the handler before this one, without listeners that have been closed since."""
        # Python cannot install a C handler again. JAX's only records the signal, so the default
        # action is better.
        previous = signal.SIG_DFL if self._previous is None else self._previous
        owner = previous.__self__ if isinstance(previous, MethodType) else None
        if isinstance(owner, SigtermListener) and not owner._is_open:
            return owner._previous_handler()
        return previous
