"""What Ray runs for an actor: a process that holds an object and calls its methods."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import select
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpudist.engine.call_listener import CallListener
from tpudist.engine.engine import Actor, ActorDied
from tpudist.engine.ray.ray_pickle import as_it_travels
from tpudist.engine.ray.ray_session import import_ray

PATIENCE_S = 0.3
"""How long Ray has to end a process that it was asked to kill, for which it takes 0.01 s."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Stands for the value of a method that has raised an error."""

    error: Exception


@dataclasses.dataclass(frozen=True)
class Process:
    """A process; its number is used again, but not with the same start.

    Attributes:
        node: Its machine, as Ray numbers them.
        pid: Its number.
        start: When it began, in ticks of its machine.
    """

    node: str
    pid: int
    start: str

    def end(self, timeout_s: float) -> bool:
        """Kills it, if it does not end by itself; whether it is gone in time."""
        try:
            number = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if _start_of(self.pid) != self.start:
                return True
            poll = select.poll()
            poll.register(number, select.POLLIN)
            if poll.poll(PATIENCE_S * 1000):
                return True
            with contextlib.suppress(PermissionError):  # Ray runs as another user, and ends it
                signal.pidfd_send_signal(number, signal.SIGKILL)
            return bool(poll.poll(max(timeout_s, 0.0) * 1000))
        except ProcessLookupError:
            return True
        finally:
            os.close(number)


class Host:
    """What Ray runs: holds the object that a factory has given, and calls its methods."""

    def __init__(self, actor: Actor, secret: bytes, factory: Callable[..., Any], *args: Any):
        """Has the factory make the object."""
        self._actor, self._secret, self._object = actor, secret, factory(*args)
        self._lock = threading.Lock()  # of calls by Ray and by lines: one runs at a time
        self._listener: CallListener | None = None

    def process(self) -> Process:
        """Where this is."""
        node, pid = import_ray().get_runtime_context().get_node_id(), os.getpid()
        return Process(node, pid, _start_of(pid))

    def ping(self) -> None:
        """Says that this is there."""

    def listen(self) -> tuple[str, int]:
        """Where this takes calls; in the thread of pings."""
        if self._listener is None:
            ray = import_ray()
            self._listener = CallListener(
                ray.util.get_node_ip_address(),
                self._secret,
                lambda message: self.call(*message),
                lambda error: Failure(as_it_travels(error)),
                pickle.loads,
                ray.cloudpickle.CloudPickler,
            )
        return self._listener.address

    def call(self, method: str, *args: Any) -> Any:
        """What a method gives; an error as a value, so that Ray leaves its type as it is."""
        try:
            with self._lock:
                return getattr(self._object, method)(*args)
        except Exception as error:
            if not isinstance(error, ActorDied):
                error.add_note(f"Raised on {self._actor}.\n{traceback.format_exc()}".rstrip())
            return Failure(as_it_travels(error))


def _start_of(pid: int) -> str:
    try:
        # Field 22 of proc(5); the name of the program, the second one, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
