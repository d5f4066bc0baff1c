"""SimulatedEngine: actors as processes of a simulation, and threads and conditions of their hosts.

The engine is a model of `engine.ray`: a call and its answer are messages, and an actor starts in
some seconds. A caller learns of a death when the connection ends: at once if a process ends, and
after the time of keepalive if its host does.
"""

from __future__ import annotations

import collections
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any

from simulation.process import Process
from simulation.scheduler import Task, Waker, current_task
from simulation.simulation import Simulation
from tpudist.engine.concurrency import Condition, MonitorCondition, MonitorLock, Thread
from tpudist.engine.engine import Actor, ActorDied, ResultTimeout
from tpudist.engine.seeded_concurrency import MIN_WAIT_S
from tpudist.processes.host import this_host
from tpudist.processes.peer_connections import DEAD_PEER_S

START_S = 2.0
"""Seconds until a new actor has imported what it needs."""
ACTORS = "actors"
"""Purpose of the messages of actors."""
_MESSAGE_BYTES = 200  # of names, headers and acknowledgments around the arguments


def here() -> Process:
    """Returns the process of this task."""
    process = this_host()
    assert isinstance(process, Process)
    return process


class SimulatedConcurrency:
    """Threads, conditions and time of the process that asks."""

    def start(self, name: str, run: Callable[[], None]) -> Thread:
        """Starts a thread."""
        return _Thread(name, here().start_thread(run, name=name))

    def condition(self) -> Condition:
        """Returns a condition."""
        return MonitorCondition(_Lock())

    def now_s(self) -> float:
        """Returns virtual time."""
        return here().monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        here().sleep(seconds)


class _Thread:
    def __init__(self, name: str, thread: Any):
        self.name, self._thread = name, thread

    def join(self, timeout_s: float | None = None) -> bool:
        if not here().is_current(self._thread):
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


class _Lock(MonitorLock):
    def __init__(self):
        super().__init__()
        self._owner: Task | None = None
        self._waiting: list[Waker] = []

    def enter(self) -> None:
        self.return_to(1)

    def leave(self) -> None:
        if self.depth == 1:
            self.leave_completely()
        else:
            self.depth -= 1

    def leave_completely(self) -> int:
        depth, self.depth = self.depth, 0
        self.wake_notified()
        self._owner = None
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake(0.0)
        return depth

    def return_to(self, entered: int) -> None:
        me = current_task()
        while self._owner not in (None, me) and not self._owner.has_ended:
            self._waiting.append(me.waker())
            here().wait()
        self.depth = entered + (self.depth if self._owner is me else 0)
        self._owner = me

    def make_turn(self) -> _Turn:
        return _Turn(current_task().waker())

    def wait(self, turn: _Turn, timeout_s: float | None) -> None:
        here().wait(None if timeout_s is None else max(timeout_s, MIN_WAIT_S))

    def now_s(self) -> float:
        return here().monotonic()


class _Turn:
    def __init__(self, wake: Waker):
        self._wake = wake

    def release(self) -> None:
        self._wake(0.0)


class _Future:
    """The result of a call, in the process that waits for it."""

    def __init__(self, actor: Actor, method: str, caller: Process):
        self.actor, self.method, self.caller = actor, method, caller
        self.is_done, self.value = False, None
        self.error: BaseException | None = None
        self._waiting: list[Waker] = []

    def finish(self, value: Any, error: BaseException | None) -> None:
        if not self.is_done:
            self.is_done, self.value, self.error = True, value, error
            waiting, self._waiting = self._waiting, []
            for wake in waiting:
                wake(0.0)

    def wait(self, timeout_s: float | None) -> bool:
        """Waits; returns whether there is a result."""
        end_s = None if timeout_s is None else here().monotonic() + timeout_s
        while not self.is_done:
            left_s = None if end_s is None else end_s - here().monotonic()
            if left_s is not None and left_s <= 0:
                return False
            self._waiting.append(current_task().waker())
            here().wait(left_s)
        return True


class SimulatedEngine:
    """Runs actors as processes; see `tpudist.engine.engine.Engine`.

    Args:
        simulation: The run. Each actor is alone on its host.

    Attributes:
        actors: All processes of actors.
    """

    actors_may_hang = True
    serializer = None

    def __init__(self, simulation: Simulation):
        self.concurrency = SimulatedConcurrency()
        self.actors: dict[Actor, ActorProcess] = {}
        self._simulation = simulation
        self._counts: collections.Counter[tuple[str, int]] = collections.Counter()
        self._places: dict[tuple[str, int], int] = {}

    def start(self) -> None:
        """Does nothing."""

    def spawn(self, role: str, index: int, factory: Callable[..., Any], *args: object) -> Actor:
        """Starts a process on the host of its role and index; on a new one if that is lost."""
        actor = Actor(role, index, self._counts[role, index])
        self._counts[role, index] += 1
        place = self._places.get((role, index))
        simulation = self._simulation
        is_lost = place is not None and (
            not simulation.is_up(place) or simulation.network.is_split(0, place)
        )
        if place is None or is_lost:
            place = self._places[role, index] = 1 + len(self.actors)
        self.actors[actor] = ActorProcess(self._simulation, actor, place, factory, args)
        return actor

    def call(self, actor: Actor, method: str, *args: object) -> _Future:
        """Sends a call."""
        return self.actors[actor].call(method, args)

    def result(self, future: _Future, timeout_s: float | None = None) -> Any:
        """Waits for an answer."""
        if not future.wait(timeout_s):
            raise ResultTimeout(f"{future.method} of {future.actor}: none in {timeout_s:g} s.")
        if future.error is not None:
            raise future.error
        return future.value

    def ping(self, actor: Actor) -> _Future:
        """Sends a ping."""
        return self.actors[actor].call("ping", ())

    def put(self, value: object) -> object:
        """Returns the value."""
        return value

    def kill(self, actor: Actor, why: str = "it was killed") -> None:
        """Ends an actor; its results no longer count, even if its host cannot be reached."""
        self.actors[actor].end_actor(why)

    def shutdown(self) -> None:
        """Ends all actors."""
        for process in self.actors.values():
            process.end_actor("the engine was shut down")


class ActorProcess(Process):
    """The process of an actor."""

    def __init__(
        self,
        simulation: Simulation,
        actor: Actor,
        place: int,
        factory: Callable[..., Any],
        args: tuple[object, ...],
    ):
        super().__init__(simulation, actor.index, 0, place)
        self.actor = actor
        self._factory, self._args, self._why, self._was_created = factory, args, "", True
        self._is_killed = False
        self._calls = self.queue()
        self._futures: list[_Future] = []
        self.ended = self._on_end
        self.run(lambda process: self._serve())

    def call(self, method: str, args: tuple[object, ...]) -> _Future:
        """Sends a call from the process of this task."""
        caller = here()
        future = _Future(self.actor, method, caller)
        if self.exit_code is not None or self._why:
            self._lose_later(future)
            return future
        self._futures.append(future)
        size = _MESSAGE_BYTES + _size_of(args)
        self.simulation.network.send(
            caller.place, self.place, ACTORS, size, lambda: self._receive(future, args)
        )
        return future

    def end_actor(self, why: str) -> None:
        """Ends the process."""
        if self._why or self.exit_code is not None:
            return
        self._why, self._is_killed = why, True
        caller = here()
        self.simulation.network.send(
            caller.place, self.place, ACTORS, _MESSAGE_BYTES, lambda: self.end(-signal.SIGKILL)
        )
        for future in self._futures:
            future.finish(None, self._died())

    def _receive(self, future: _Future, args: tuple[object, ...]) -> None:
        if self.exit_code is None:
            if future.method == "ping":  # another thread answers
                self.start_thread(self._answer, future, None, None, name="ping")
            else:
                self._calls.put((future, args))

    def _serve(self) -> None:
        self.sleep(START_S)
        try:
            instance = self._factory(*self._args)
        except Exception:
            self._why, self._was_created = traceback.format_exc(), False
            self.exit(1)
        while True:
            future, args = self._calls.get()
            try:
                value, error = getattr(instance, future.method)(*args), None
            except Exception as raised:
                value, error = None, raised
            self._answer(future, value, error)

    def _answer(self, future: _Future, value: object, error: BaseException | None) -> None:
        if future in self._futures:
            self._futures.remove(future)
        self.simulation.network.send(
            self.place,
            future.caller.place,
            ACTORS,
            _MESSAGE_BYTES + _size_of(value),
            lambda: future.finish(value, error),
        )

    def _on_end(self) -> None:
        self._why = self._why or f"its process ended with {self.exit_code}"
        futures, self._futures = self._futures, []
        for future in futures:
            self._lose_later(future)

    def _lose_later(self, future: _Future) -> None:
        def lose() -> None:
            future.finish(None, self._died())

        network, place = self.simulation.network, future.caller.place
        if self._is_killed:  # the program's host has Ray's table of actors
            network.send(0, place, ACTORS, _MESSAGE_BYTES, lose)
        elif self.simulation.is_up(self.place) and not network.is_split(self.place, place):
            network.send(self.place, place, ACTORS, _MESSAGE_BYTES, lose)
        else:
            self.simulation.scheduler.after(DEAD_PEER_S, lose)

    def _died(self) -> ActorDied:
        return ActorDied(self.actor, self._why, self._was_created)


def _size_of(value: object) -> int:
    try:
        return len(pickle.dumps(value))
    except Exception:  # it has functions of the simulation
        return 500
