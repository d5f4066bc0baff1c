"""Calls of actors that are processes of Ray.

The first calls of an actor go by Ray. Once it has answered, and says where it listens, a caller
connects to it, and what it calls later goes that way, for a tenth of the time (`call_line`). Where
that cannot be, all goes by Ray. It is Ray that knows whether an actor lives.
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
from tpudist.engine.ray.ray_pickle import name_what_cannot_be_pickled, references, values
from tpudist.engine.ray.ray_session import import_ray

END_S = 5.0
"""How long a killed process has to be gone, and who waits for results to see that it is over."""
PINGS = "pings"
"""The thread of an actor that answers while another one runs its calls, as Ray names it."""
LOOK_S = 5.0
"""How often Ray is asked whether an actor lives that was called by a line and has not answered."""
OVER = "the engine was shut down"
"""Why all actors have died in the end."""
_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class RayFuture:
    """A call: by Ray, which gives a reference, or by a line; neither if the actor is dead."""

    actor: Actor
    method: str
    reference: Any = None
    line: CallLine | None = None
    reply: Reply | None = None


def _warn(actor: Actor, why: str) -> None:
    _log.warning(
        "%s is called through Ray, which is slower than a direct connection: %s", actor, why
    )


class _Peer:
    """An actor as one caller sees it.

    Attributes:
        handle: Ray's.
        lock: Of what follows, and so that calls go out in their order.
        address: What Ray is to say of where it listens; None before it was asked.
        last: The last call that went by Ray.
        line: How it is called, once it was found out; None for by Ray.
    """

    def __init__(self, handle: Any):
        """By Ray at first."""
        self.handle, self.lock = handle, threading.Lock()
        self.address: Any = None
        self.last: Any = None
        self.line: CallLine | None = None
        self._found: queue.SimpleQueue[CallLine | None] = queue.SimpleQueue()
        self._is_connecting = self._is_decided = False

    def find_line(self, actor: Actor, secret: bytes) -> CallLine | None:
        """The line, which is taken when no call by Ray is under way, so that none is overtaken."""
        if self._is_decided:
            return self.line
        ray = import_ray()
        if self.address is None:
            self.address = self.handle.listen.options(concurrency_group=PINGS).remote()
        wanted = [x for x in (self.address, self.last) if x is not None]
        if len(ray.wait(wanted, num_returns=len(wanted), timeout=0)[0]) < len(wanted):
            return None
        if not self._is_connecting:
            self._is_connecting = True
            try:
                address = ray.get(self.address)
            except ray.exceptions.RayActorError:  # it has died, as Ray will say of the next call
                self._is_decided = True
                return None
            except ray.exceptions.RayError as error:
                self._is_decided = True
                _warn(actor, f"it cannot listen: {error}")
                return None
            threading.Thread(
                target=self._connect, args=(actor, address, secret), daemon=True
            ).start()
        if not self._found.empty():
            self._is_decided, self.line = True, self._found.get()
        return self.line

    def _connect(self, actor: Actor, address: tuple[str, int], secret: bytes) -> None:
        """In a thread: who calls does not wait for the network."""
        try:
            self._found.put(CallLine(address, secret, import_ray().cloudpickle.CloudPickler))
        except OSError as error:
            _warn(actor, f"no process answers at {address[0]}:{address[1]}: {error}")
            self._found.put(None)

    def close(self) -> None:
        """Ends the line."""
        while not self._found.empty():
            line = self._found.get()
            if line is not None:
                line.close()
        if self.line is not None:
            self.line.close()


class Calls:
    """Calls by one process, and what they give.

    Attributes:
        namespace: Of the run, in which Ray knows actors by their names.
    """

    def __init__(self, namespace: str, secret: bytes, concurrency: Concurrency):
        """None yet."""
        self.namespace, self.secret = namespace, secret
        self._peers: dict[Actor, _Peer] = {}
        self._why: dict[Actor, str] = {}
        self._num_waiting = 0
        self._is_over = False
        self._changed = concurrency.condition()

    def add(self, actor: Actor, handle: Any) -> _Peer:
        """Has Ray's handle of an actor, which lives no longer than that one."""
        with self._changed:
            return self._peers.setdefault(actor, _Peer(handle))

    def call(self, actor: Actor, method: str, args: tuple) -> RayFuture:
        """As `RayEngine.call`."""
        peer = self._find(actor)
        if peer is None:
            return RayFuture(actor, method)
        with name_what_cannot_be_pickled(f"{method} of {actor}", args), peer.lock:
            line = peer.find_line(actor, self.secret)
            if line is None:
                peer.last = peer.handle.call.remote(method, *references(args))
                return RayFuture(actor, method, peer.last)
            reply = line.call((method, *values(args)))
            return RayFuture(actor, method, line=line, reply=reply)

    def ping(self, actor: Actor) -> RayFuture:
        """As `RayEngine.ping`."""
        peer = self._find(actor)
        if peer is None:
            return RayFuture(actor, "ping")
        return RayFuture(actor, "ping", _ping(peer.handle))

    def result(self, future: RayFuture, timeout_s: float | None) -> Any:
        """As `RayEngine.result`."""
        with self._changed:
            if (future.reference is None and future.reply is None) or self._is_over:
                raise self._death(future.actor, "Ray no longer has an actor with this name")
            self._num_waiting += 1
        try:
            by_ray = future.reply is None
            value = (self._get if by_ray else self._wait)(future, timeout_s)
        finally:
            with self._changed:
                self._num_waiting -= 1
                self._changed.notify_all()
        if isinstance(value, Failure):
            raise value.error
        return value

    def kill(self, actor: Actor, why: str) -> bool:
        """Asks Ray to end an actor; whether it was alive, as far as this process knows."""
        with self._changed:
            if actor in self._why:
                return False
            self._why[actor] = why
            peer = self._peers.pop(actor, None)
        if peer is not None:
            import_ray().kill(peer.handle)
            peer.close()
        return peer is not None

    def close(self) -> None:
        """Refuses what comes later, and lets go who waits: Ray may not end under a call of it."""
        with self._changed:
            self._is_over = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting, END_S)

    def _get(self, future: RayFuture, timeout_s: float | None) -> Any:
        ray, actor = import_ray(), future.actor
        try:
            return ray.get(future.reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise _timeout(future, timeout_s) from None
        except ray.exceptions.RayTaskError as error:
            # Not raised by the method: an argument, or what it gives, cannot be read or sent.
            raise error.cause from error
        except ray.exceptions.ActorUnavailableError as error:
            why = f"it was unreachable, so it was killed.\n{error}"
            self.kill(actor, why)
            raise self._death(actor, why) from None
        except ray.exceptions.RayActorError as error:
            how = "it could not be created.\n" if error.actor_init_failed else ""
            was_made = not error.actor_init_failed
            raise self._death(actor, f"{how}{error}", was_made) from None
        except ray.exceptions.RayError as error:
            # Whatever else Ray says, such as of a machine that is gone: there is no result.
            raise self._death(actor, f"{type(error).__name__}: {error}") from None

    def _wait(self, future: RayFuture, timeout_s: float | None) -> Any:
        """As `_get`, of a call by a line, which may not hear that a machine is gone."""
        line, reply = future.line, future.reply
        assert line is not None
        assert reply is not None
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        ping: RayFuture | None = None
        while True:
            left_s = LOOK_S if end_s is None else min(LOOK_S, end_s - time.monotonic())
            try:
                if line.wait(reply, max(left_s, 0.0)):
                    return reply.value(pickle.loads)
            except OSError as error:
                raise self._find_death(future.actor, error) from None
            if end_s is not None and time.monotonic() >= end_s:
                raise _timeout(future, timeout_s)
            ping = ping or self.ping(future.actor)
            with contextlib.suppress(ResultTimeout):  # it hangs, or works
                self._ask(ping, 0.0)
                ping = None

    def _find_death(self, actor: Actor, broken: OSError) -> ActorDied:
        """What Ray says of an actor of which the line has ended; if it lives, it does not any more.

        What it was called for may have run or not, and what it is called for later could overtake.
        """
        with self._changed:
            peer = self._peers.get(actor)
        if peer is not None:
            peer.close()
        try:
            self._ask(self.ping(actor), END_S)
            seen = "Ray says that it lives"
        except ActorDied as died:
            return died
        except ResultTimeout:
            seen = "it does not answer"
        why = f"the connection to it ended, {seen}, and it was killed.\n{broken}"
        self.kill(actor, why)
        return self._death(actor, why)

    def _ask(self, ping: RayFuture, timeout_s: float) -> None:
        if ping.reference is None:
            raise self._death(ping.actor, "Ray no longer has an actor with this name")
        self._get(ping, timeout_s)

    def _find(self, actor: Actor) -> _Peer | None:
        """What is known of an actor; None if it is not alive."""
        with self._changed:
            if actor in self._why or self._is_over:
                return None
            peer = self._peers.get(actor)
        if peer is None:
            try:
                handle = import_ray().get_actor(str(actor), namespace=self.namespace)
            except ValueError:
                return None
            peer = self.add(actor, handle)
        return peer

    def _death(self, actor: Actor, why: str, was_made: bool = True) -> ActorDied:
        why = self._why.get(actor, OVER if self._is_over else why)
        return ActorDied(actor, why, was_made)


def _ping(handle: Any) -> Any:
    return handle.ping.options(concurrency_group=PINGS).remote()


def _timeout(future: RayFuture, timeout_s: float | None) -> ResultTimeout:
    return ResultTimeout(f"{future.method} of {future.actor} has no result after {timeout_s:g} s.")
