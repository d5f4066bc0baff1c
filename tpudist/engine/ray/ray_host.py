"""Host: the process that Ray runs for an actor. It holds an object and calls its methods."""

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
from tpudist.engine.ray.ray_pickle import make_picklable
from tpudist.engine.ray.ray_session import import_ray

PATIENCE_S = 0.3
"""Seconds in which Ray may end a process that it was asked to kill; it usually takes 0.01 s."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Stands for the result of a method that raised an error."""

    error: Exception


@dataclasses.dataclass(frozen=True)
class Process:
    """A process. Its number may be used again, but not with the same start.

    Attributes:
        node: Ray's name of its machine.
        pid: Number of the process.
        start: Time of its start, in ticks of its machine.
    """

    node: str
    pid: int
    start: str

    def end(self, timeout_s: float) -> bool:
        """Kills it if it does not end by itself; returns whether it is gone after `timeout_s`."""
        try:
            # A pidfd refers to this process even if its number is used again later.
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if _start_of(self.pid) != self.start:
                return True
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if poll.poll(PATIENCE_S * 1000):
                return True
            with contextlib.suppress(PermissionError):  # a process of another user, which Ray ends
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return bool(poll.poll(max(timeout_s, 0.0) * 1000))
        except ProcessLookupError:
            return True
        finally:
            os.close(descriptor)


class Host:
    """Holds the object that a factory returns, and calls its methods.

    Args:
        actor: The actor, for messages.
        secret: Secret that direct callers must know.
        factory: Called with `args`; returns the object.
        args: Arguments of the factory.
    """

    def __init__(self, actor: Actor, secret: bytes, factory: Callable[..., Any], *args: Any):
        self._actor, self._secret, self._object = actor, secret, factory(*args)
        self._lock = threading.Lock()  # one call runs at a time, through Ray or over a line
        self._listener: CallListener | None = None

    def process(self) -> Process:
        """Returns this process."""
        node, pid = import_ray().get_runtime_context().get_node_id(), os.getpid()
        return Process(node, pid, _start_of(pid))

    def ping(self) -> None:
        """Answers that this process is alive."""

    def listen(self) -> tuple[str, int]:
        """Returns the address for direct calls; runs in the thread of pings."""
        if self._listener is None:
            ray = import_ray()
            self._listener = CallListener(
                ray.util.get_node_ip_address(),
                self._secret,
                lambda message: self.call(*message),
                lambda error: Failure(make_picklable(error)),
                pickle.loads,
                ray.cloudpickle.CloudPickler,
            )
        return self._listener.address

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method; returns its result, or a `Failure`: Ray would change the error's type."""
        try:
            with self._lock:
                return getattr(self._object, method)(*args)  # the interface calls by name
        except Exception as error:
            if not isinstance(error, ActorDied):
                error.add_note(f"Raised on {self._actor}.\n{traceback.format_exc()}".rstrip())
            return Failure(make_picklable(error))


def _start_of(pid: int) -> str:
    try:
        # Field 22 of proc(5). Field 2, the program's name, may contain any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
