"""Wakeups: signals to a supervisor, and ends of its child processes.

Without them, a supervisor would look at all of its processes fifty times per second, while those
import JAX on the same cores.
"""

import contextlib
import selectors
import signal
import socket
from collections.abc import Iterator
from typing import Protocol


class Wakeups(Protocol):
    """Ends a wait when a signal arrives.

    Attributes:
        signals: SIGTERM and SIGINT, in the order in which they arrived.
    """

    signals: list[int]

    def wait(self, timeout_s: float) -> bool:
        """Waits for a signal or the end of a child process; returns whether one has arrived.

        Returns at once if it has arrived since the last wait, and at the latest after `timeout_s`.
        """
        ...


class SystemWakeups(Wakeups):
    """The wakeups of the operating system."""

    def __init__(self, receiver: socket.socket):
        self.signals = []
        self._receiver = receiver

    def wait(self, timeout_s: float) -> bool:
        """Waits; see `Wakeups`."""
        # One byte for each signal; see `signal.set_wakeup_fd`. A full buffer drops some, which is
        # harmless: the caller looks at all processes after any of them.
        with selectors.DefaultSelector() as selector:  # `select` fails for descriptors from 1024 on
            selector.register(self._receiver, selectors.EVENT_READ)
            has_arrived = bool(selector.select(timeout_s))
        if has_arrived:
            self._receiver.recv(4096)
        return has_arrived


@contextlib.contextmanager
def receive_wakeups() -> Iterator[Wakeups]:
    """Yields the wakeups of this process, in its main thread."""
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.setblocking(False)
        wakeups = SystemWakeups(receiver)
        fd_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        handlers_before = {
            # Python writes to the socket only for signals that have a handler.
            signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda number, frame: None),
            **{
                number: signal.signal(number, lambda number, frame: wakeups.signals.append(number))
                for number in (signal.SIGTERM, signal.SIGINT)
            },
        }
        try:
            yield wakeups
        finally:
            for number, handler in handlers_before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(fd_before)
