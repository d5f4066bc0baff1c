"""RayCalls: calls of actors that are processes of Ray.

The first calls of an actor go through Ray. Once the actor listens, the caller connects to it, and
sends later calls directly, which takes about a tenth of the time (`call_line`). If it cannot
connect, all calls go through Ray. Ray decides whether an actor is alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pickle
import queue
import threading
import time
from typing import Any

from tpudist.engine.call_line import CallLine, Reply
from tpudist.engine.concurrency import Concurrency
from tpudist.engine.engine import Actor, ActorDied, ResultTimeout
from tpudist.engine.ray.ray_host import Failure
from tpudist.engine.ray.ray_pickle import (
    ObjectRef,
    explain_pickle_errors,
    resolve_refs,
    unwrap_refs,
)
from tpudist.engine.ray.ray_session import import_ray

END_S = 5.0
"""Seconds until a killed process must be gone, and until waiting callers must see the end."""
PINGS = "pings"
"""Ray's name of the actor's thread that answers pings while another thread runs calls."""
PING_EVERY_S = 5.0
"""Seconds after which Ray is asked again whether an actor that does not answer is alive."""
SHUTDOWN_CAUSE = "the engine was shut down"
"""Cause of death of all actors at the end."""
_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class RayFuture:
    """A call through Ray (`reference`) or over a line (`reply`); neither if the actor is dead."""

    actor: Actor
    method: str
    reference: ObjectRef | None = None
    line: CallLine | None = None
    reply: Reply | None = None


def _warn(actor: Actor, why: str) -> None:
    _log.warning(
        "%s is called through Ray, which is slower than a direct connection: %s", actor, why
    )


class _Peer:
    """An actor, as one caller sees it.

    Attributes:
        handle: Ray's handle of the actor.
        lock: Guards the other attributes, and keeps calls in order.
        address: Ray's reference to the address of the actor's listener; None before the request.
        last: Ray's reference to the last call through Ray.
        line: Direct connection, if there is one.
    """

    def __init__(self, handle: Any):  # ray.actor.ActorHandle, whose methods are dynamic
        self.handle, self.lock = handle, threading.Lock()
        self.address: ObjectRef | None = None
        self.last: ObjectRef | None = None
        self.line: CallLine | None = None
        self._new_lines: queue.SimpleQueue[CallLine | None] = queue.SimpleQueue()
        self._is_connecting = self._has_searched = self._is_closed = False

    def find_line(self, actor: Actor, secret: bytes) -> CallLine | None:
        """Returns the line, or None while calls go through Ray."""
        # Calls must not overtake each other, so the switch happens only when all calls through Ray
        # have finished. It happens once: `_has_searched` is set with a line or without.
        if self._has_searched:
            return self.line
        ray = import_ray()
        if self.address is None:
            self.address = self.handle.listen.options(concurrency_group=PINGS).remote()
        pending = [x for x in (self.address, self.last) if x is not None]
        if len(ray.wait(pending, num_returns=len(pending), timeout=0)[0]) < len(pending):
            return None
        if not self._is_connecting:
            self._is_connecting = True
            try:
                address = ray.get(self.address)
            except ray.exceptions.RayActorError:
                # The actor has died; the next call through Ray reports it.
                self._has_searched = True
                return None
            except ray.exceptions.RayError as error:
                self._has_searched = True
                _warn(actor, f"it cannot listen: {error}")
                return None
            threading.Thread(
                target=self._connect, args=(actor, address, secret), daemon=True
            ).start()
        if not self._new_lines.empty():
            self._has_searched, self.line = True, self._new_lines.get()
        return self.line

    def _connect(self, actor: Actor, address: tuple[str, int], secret: bytes) -> None:
        """Connects, in a thread, because callers must not wait for the network."""
        try:
            self._new_lines.put(CallLine(address, secret, import_ray().cloudpickle.CloudPickler))
        except OSError as error:
            _warn(actor, f"no process answers at {address[0]}:{address[1]}: {error}")
            self._new_lines.put(None)
        if self._is_closed:  # `close` may have missed the line
            self.close()

    def close(self) -> None:
        """Closes the line, even if it is still connecting."""
        self._is_closed = True
        while not self._new_lines.empty():
            line = self._new_lines.get()
            if line is not None:
                line.close()
        if self.line is not None:
            self.line.close()


class RayCalls:
    """Calls by one process, and their results.

    Args:
        namespace: Namespace of the run, in which Ray finds actors by name.
        secret: Secret of the run's processes.
        concurrency: Provides the condition.
    """

    def __init__(self, namespace: str, secret: bytes, concurrency: Concurrency):
        self.namespace, self.secret = namespace, secret
        # `_changed` guards the attributes below. A peer's lock is never taken while holding it.
        self._peers: dict[Actor, _Peer] = {}
        self._causes: dict[Actor, str] = {}  # causes of death of killed actors
        self._num_waiting = 0  # threads in `result`
        self._is_over = False
        self._changed = concurrency.condition()

    def add(self, actor: Actor, handle: Any) -> _Peer:  # ray.actor.ActorHandle
        """Registers Ray's handle of an actor."""
        with self._changed:
            return self._peers.setdefault(actor, _Peer(handle))

    def call(self, actor: Actor, method: str, args: tuple[object, ...]) -> RayFuture:
        """Calls a method; see `RayEngine.call`."""
        peer = self._find(actor)
        if peer is None:
            return RayFuture(actor, method)
        with explain_pickle_errors(f"{method} of {actor}", args), peer.lock:
            line = peer.find_line(actor, self.secret)
            if line is None:
                peer.last = peer.handle.call.remote(method, *unwrap_refs(args))
                return RayFuture(actor, method, peer.last)
            reply = line.call((method, *resolve_refs(args)))
            return RayFuture(actor, method, line=line, reply=reply)

    def ping(self, actor: Actor) -> RayFuture:
        """Pings an actor; see `RayEngine.ping`."""
        peer = self._find(actor)
        if peer is None:
            return RayFuture(actor, "ping")
        return RayFuture(actor, "ping", peer.handle.ping.options(concurrency_group=PINGS).remote())

    def result(self, future: RayFuture, timeout_s: float | None) -> Any:
        """Waits for a result; see `RayEngine.result`."""
        with self._changed:
            if (future.reference is None and future.reply is None) or self._is_over:
                raise self._death(future.actor, "Ray no longer has an actor with this name")
            self._num_waiting += 1
        try:
            if future.reply is None:
                value = self._get(future, timeout_s)
            else:
                value = self._wait(future, timeout_s)
        finally:
            with self._changed:
                self._num_waiting -= 1
                self._changed.notify_all()
        if isinstance(value, Failure):
            raise value.error
        return value

    def kill(self, actor: Actor, why: str) -> bool:
        """Asks Ray to end an actor; returns whether it was alive, as far as this process knows."""
        with self._changed:
            if actor in self._causes:
                return False
            self._causes[actor] = why
            peer = self._peers.pop(actor, None)
        if peer is not None:
            import_ray().kill(peer.handle)
            peer.close()
        return peer is not None

    def close(self) -> None:
        """Rejects new calls and releases waiting callers."""
        with self._changed:
            self._is_over = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
        with self._changed:
            # Ray must not shut down while a thread is in one of its calls.
            self._changed.wait_for(lambda: not self._num_waiting, END_S)

    def _get(self, future: RayFuture, timeout_s: float | None) -> Any:
        ray, actor = import_ray(), future.actor
        try:
            return ray.get(future.reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise _timeout(future, timeout_s) from None
        except ray.exceptions.RayTaskError as error:
            # Not an error of the method (`Failure`): an argument or the result cannot be sent.
            if error.cause is None:
                raise
            raise error.cause from error
        except ray.exceptions.ActorUnavailableError as error:
            why = f"it was unreachable, so it was killed.\n{error}"
            self.kill(actor, why)
            raise self._death(actor, why) from None
        except ray.exceptions.RayActorError as error:
            was_created = not error.actor_init_failed
            prefix = "" if was_created else "it could not be created.\n"
            raise self._death(actor, f"{prefix}{error}", was_created) from None
        except ray.exceptions.RayError as error:
            # Any other error of Ray, such as a lost machine, also means that there is no result.
            raise self._death(actor, f"{type(error).__name__}: {error}") from None

    def _wait(self, future: RayFuture, timeout_s: float | None) -> Any:
        """Waits for the result of a call over a line."""
        line, reply = future.line, future.reply
        assert line is not None
        assert reply is not None
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        ping: RayFuture | None = None
        while True:
            left_s = PING_EVERY_S if end_s is None else min(PING_EVERY_S, end_s - time.monotonic())
            try:
                if line.wait(reply, max(left_s, 0.0)):
                    return reply.value(pickle.loads)
            except OSError as error:
                raise self._find_death(future.actor, error) from None
            if end_s is not None and time.monotonic() >= end_s:
                raise _timeout(future, timeout_s)
            ping = ping or self.ping(future.actor)
            # A connection does not notice that a machine is gone; Ray does. A ping that is not
            # answered yet shows nothing: the actor may hang, or work. It stays in flight.
            with contextlib.suppress(ResultTimeout):
                self._ask(ping, 0.0)
                ping = None

    def _find_death(self, actor: Actor, broken: OSError) -> ActorDied:
        """Returns why an actor died whose line has ended; kills it if Ray says that it lives."""
        with self._changed:
            peer = self._peers.get(actor)
        if peer is not None:
            peer.close()
        try:
            self._ask(self.ping(actor), END_S)
            # It cannot stay alive: the call may have run or not, and a call through Ray could
            # overtake it.
            status = "Ray says that it lives"
        except ActorDied as died:
            return died
        except ResultTimeout:
            status = "it does not answer"
        why = f"the connection to it ended, {status}, and it was killed.\n{broken}"
        self.kill(actor, why)
        return self._death(actor, why)

    def _ask(self, ping: RayFuture, timeout_s: float) -> None:
        if ping.reference is None:
            raise self._death(ping.actor, "Ray no longer has an actor with this name")
        self._get(ping, timeout_s)

    def _find(self, actor: Actor) -> _Peer | None:
        """Returns the peer of an actor; None if it is not alive."""
        with self._changed:
            if actor in self._causes or self._is_over:
                return None
            peer = self._peers.get(actor)
        if peer is None:
            try:
                handle = import_ray().get_actor(str(actor), namespace=self.namespace)
            except ValueError:
                return None
            peer = self.add(actor, handle)
        return peer

    def _death(self, actor: Actor, why: str, was_created: bool = True) -> ActorDied:
        why = self._causes.get(actor, SHUTDOWN_CAUSE if self._is_over else why)
        return ActorDied(actor, why, was_created)


def _timeout(future: RayFuture, timeout_s: float | None) -> ResultTimeout:
    return ResultTimeout(f"{future.method} of {future.actor} has no result after {timeout_s:g} s.")
