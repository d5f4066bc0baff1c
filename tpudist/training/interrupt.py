"""Ctrl-C as a request: the step under way is finished and results are written first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

EXIT_CODE = 130
"""What a shell expects of a program that Ctrl-C ended."""


class StopOnInterrupt:
    """While entered, the first Ctrl-C sets `requested`; the second interrupts at once, as usual."""

    def __init__(self, on_request: Callable[[], None] | None = None):
        """Calls `on_request` once, when Ctrl-C is first pressed."""
        self.requested = False
        self._on_request = on_request
        self._previous = None

    def __enter__(self) -> StopOnInterrupt:
        """Takes over the signal; only in the main thread, where Python allows it."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives the signal back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._on_request is not None:
            self._on_request()
