"""Ctrl-C as a request to stop, so that the current step and the results are completed first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

EXIT_CODE = 130
"""Exit code by which shells recognize a program that Ctrl-C ended."""


class StopOnInterrupt:
    """Context in which the first Ctrl-C sets `requested`; the second interrupts immediately.

    Args:
        on_request: Called without arguments at the first Ctrl-C.

    Attributes:
        requested: Whether Ctrl-C was pressed.
    """

    def __init__(self, on_request: Callable[[], None] | None = None):
        self.requested = False
        self._on_request = on_request
        # The handler to restore. None means that none was installed here: in another thread.
        self._previous = None

    def __enter__(self) -> StopOnInterrupt:
        """Installs the signal handler."""
        # Python allows that only in the main thread. In others, Ctrl-C keeps its meaning.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the previous signal handler."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C must always work, also if the step hangs in a collective: the exception is
        # raised in whatever Python code runs next.
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._on_request is not None:
            self._on_request()
