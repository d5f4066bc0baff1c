"""Calls of actors that are processes of Ray: what is sent, what runs there, and what comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpudist.engine.concurrency import Concurrency
from tpudist.engine.engine import Actor, ActorDied, ResultTimeout
from tpudist.engine.ray_session import import_ray

END_S = 5.0
"""How long a killed process has to be gone, and who waits for results to see that it is over."""
PATIENCE_S = 0.3
"""How long Ray has to end a process that it was asked to kill, for which it takes 0.01 s."""
PINGS = "pings"
"""The thread of an actor that answers while another one runs its calls, as Ray names it."""
OVER = "the engine was shut down"
"""Why all actors have died in the end."""


@dataclasses.dataclass(frozen=True)
class RayRef:
    """A value in Ray's memory.

    Attributes:
        reference: Ray's.
    """

    reference: Any


class RaySerializer:
    """Makes bytes as Ray makes them of functions and arguments."""

    def dumps(self, value: Any) -> bytes:
        """The bytes of a value.

        Raises:
            TypeError: Something in it cannot be pickled.
        """
        name = getattr(value, "__qualname__", type(value).__name__)
        with name_what_cannot_be_pickled(f"'{name}'", (value,)):
            return import_ray().cloudpickle.dumps(value)

    @property
    def loads(self) -> Callable[[bytes], Any]:
        """What makes a value of them."""
        return load


def load(data: bytes) -> Any:
    """What was pickled, by a process of the same run."""
    return import_ray().cloudpickle.loads(data)


@dataclasses.dataclass(frozen=True)
class RayFuture:
    """A call; without a reference if the actor was known to be dead."""

    actor: Actor
    method: str
    reference: Any


@dataclasses.dataclass(frozen=True)
class _Failure:
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

    def __init__(self, actor: Actor, factory: Callable[..., Any], *args: Any):
        """Has the factory make the object."""
        self._actor, self._object = actor, factory(*args)

    def process(self) -> Process:
        """Where this is."""
        node, pid = import_ray().get_runtime_context().get_node_id(), os.getpid()
        return Process(node, pid, _start_of(pid))

    def ping(self) -> None:
        """Says that this is there."""

    def call(self, method: str, *args: Any) -> Any:
        """What a method gives; an error as a value, so that Ray leaves its type as it is."""
        try:
            return getattr(self._object, method)(*args)
        except Exception as error:
            if not isinstance(error, ActorDied):
                error.add_note(f"Raised on {self._actor}.\n{traceback.format_exc()}".rstrip())
            return _Failure(_as_it_travels(error))


class Calls:
    """Calls by one process, and what they give.

    Attributes:
        namespace: Of the run, in which Ray knows actors by their names.
    """

    def __init__(self, namespace: str, concurrency: Concurrency):
        """None yet."""
        self.namespace = namespace
        self._handles: dict[Actor, Any] = {}
        self._why: dict[Actor, str] = {}
        self._num_waiting = 0
        self._is_over = False
        self._changed = concurrency.condition()

    def add(self, actor: Actor, handle: Any) -> None:
        """Has Ray's handle of an actor, which lives no longer than that one."""
        with self._changed:
            self._handles[actor] = handle

    def call(self, actor: Actor, method: str, args: tuple) -> RayFuture:
        """As `RayEngine.call`."""
        handle = self._handle(actor)
        if handle is None:
            return RayFuture(actor, method, None)
        with name_what_cannot_be_pickled(f"{method} of {actor}", args):
            return RayFuture(actor, method, handle.call.remote(method, *references(args)))

    def ping(self, actor: Actor) -> RayFuture:
        """As `RayEngine.ping`."""
        handle = self._handle(actor)
        if handle is None:
            return RayFuture(actor, "ping", None)
        return RayFuture(actor, "ping", handle.ping.options(concurrency_group=PINGS).remote())

    def result(self, future: RayFuture, timeout_s: float | None) -> Any:
        """As `RayEngine.result`."""
        with self._changed:
            if future.reference is None or self._is_over:
                raise self._death(future.actor, "Ray has no actor of its name any more")
            self._num_waiting += 1
        try:
            value = self._get(future, timeout_s)
        finally:
            with self._changed:
                self._num_waiting -= 1
                self._changed.notify_all()
        if isinstance(value, _Failure):
            raise value.error
        return value

    def kill(self, actor: Actor, why: str) -> bool:
        """Asks Ray to end an actor; whether it was alive, as far as this process knows."""
        with self._changed:
            if actor in self._why:
                return False
            self._why[actor] = why
            handle = self._handles.pop(actor, None)
        if handle is not None:
            import_ray().kill(handle)
        return handle is not None

    def close(self) -> None:
        """Refuses what comes later, and lets go who waits: Ray may not end under a call of it."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._num_waiting, END_S)

    def _get(self, future: RayFuture, timeout_s: float | None) -> Any:
        ray, actor = import_ray(), future.actor
        try:
            return ray.get(future.reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise ResultTimeout(
                f"{future.method} of {actor} has no result after {timeout_s:g} s."
            ) from None
        except ray.exceptions.RayTaskError as error:
            # Not raised by the method: an argument, or what it gives, cannot be read or sent.
            raise error.cause from error
        except ray.exceptions.ActorUnavailableError as error:
            why = f"it cannot be reached, and was killed.\n{error}"
            self.kill(actor, why)
            raise self._death(actor, why) from None
        except ray.exceptions.RayActorError as error:
            how = "it could not be made.\n" if error.actor_init_failed else ""
            was_made = not error.actor_init_failed
            raise self._death(actor, f"{how}{error}", was_made) from None
        except ray.exceptions.RayError as error:
            # Whatever else Ray says, such as of a machine that is gone: there is no result.
            raise self._death(actor, f"{type(error).__name__}: {error}") from None

    def _handle(self, actor: Actor) -> Any:
        """Ray's handle; None if the actor is not alive."""
        with self._changed:
            if actor in self._why or self._is_over:
                return None
            handle = self._handles.get(actor)
        if handle is None:
            try:
                handle = import_ray().get_actor(str(actor), namespace=self.namespace)
            except ValueError:
                return None
            self.add(actor, handle)
        return handle

    def _death(self, actor: Actor, why: str, was_made: bool = True) -> ActorDied:
        why = self._why.get(actor, OVER if self._is_over else why)
        return ActorDied(actor, why, was_made)


def put(value: Any) -> RayRef:
    """Puts a value into Ray's memory."""
    with name_what_cannot_be_pickled("put", (value,)):
        return RayRef(import_ray().put(value))


def references(args: tuple) -> tuple:
    """The arguments as Ray takes them."""
    return tuple(x.reference if isinstance(x, RayRef) else x for x in args)


@contextlib.contextmanager
def name_what_cannot_be_pickled(of: str, args: tuple) -> Iterator[None]:
    """Raises a short TypeError where Ray raises one of pages."""
    try:
        yield
    except Exception:
        for i, x in enumerate(args):
            if (why := _why_not_pickled(x)) is not None:
                raise TypeError(
                    f"Argument {i} of {of} cannot be sent to another process: {x!r:.200}\n{why}"
                ) from None
        raise


def _why_not_pickled(x: Any) -> str | None:
    try:
        import_ray().cloudpickle.dumps(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _as_it_travels(error: Exception) -> Exception:
    """The error, or a RuntimeError of its text if the other side could not read it."""
    pickle = import_ray().cloudpickle
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as why:
        text = "".join(traceback.format_exception(error))
        return RuntimeError(f"{type(error).__name__}, which cannot be pickled ({why}).\n{text}")
    return error


def _start_of(pid: int) -> str:
    try:
        # Field 22 of proc(5); the name of the program, the second one, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
