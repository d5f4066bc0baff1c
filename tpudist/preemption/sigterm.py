"""SIGTERM as a request: it is noted, and the program decides when to end."""

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from tpudist.processes.preemption_service import SigtermHandler

_all: "weakref.WeakSet[SigtermListener]" = weakref.WeakSet()


def _close_all() -> None:
    for listener in list(_all):
        listener.close()


# A forked child has nothing to save, and `terminate()` of multiprocessing must end it.
os.register_at_fork(after_in_child=_close_all)


class SigtermListener:
    """Calls a function at each SIGTERM, which no longer ends the process, until it is closed.

    A handler that was written in Python and was there before is called too; an exit that it asks
    for is put off, since the state is to be saved first. JAX's own, which only notes the signal
    for functions that nobody calls here, is replaced. Ctrl-C stays as it is.
    """

    def __init__(self, on_signal: Callable[[], Any]):
        """Takes over SIGTERM; only in the main thread.

        Args:
            on_signal: Called in the main thread between two operations of Python: no locks in it.

        Raises:
            ValueError: In another thread, where Python allows no signal handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"Python handles SIGTERM only in the main thread, but this is thread "
                f"{threading.current_thread().name!r}. Create the object in the main thread, or "
                f"pass a termination_watcher_fn to TerminationConfig."
            )
        self._on_signal = on_signal
        self._is_open = True
        self._previous: Any = signal.signal(signal.SIGTERM, self._handle)
        _all.add(self)

    def close(self) -> None:
        """Gives SIGTERM back, or where that is not possible passes it on."""
        self._is_open = False
        if self._is_installed() and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous_handler())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        listens = self._is_open
        if listens:
            self._on_signal()
        previous = self._previous_handler()
        if listens and isinstance(previous, SigtermHandler):
            return  # it ends those that do not listen
        if callable(previous):
            try:
                previous(number, frame)
            except SystemExit:
                if not listens:
                    raise
        elif not listens and previous == signal.SIG_DFL and self._is_installed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _is_installed(self) -> bool:
        """Whether it is called by the signal, and not by a handler that came later."""
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _previous_handler(self) -> Any:
        """What was there before, other than listeners that have been closed since."""
        previous = signal.SIG_DFL if self._previous is None else self._previous
        below = getattr(previous, "__self__", None)
        if isinstance(below, SigtermListener) and not below._is_open:
            return below._previous_handler()
        return previous
