"""Growth of the coordinator's CPU time per scheduled function with the number of workers.

`threads`: workers and servers are threads of this process, so its time includes their work.
`lines`: workers are stubs in another process, which answer over the connections that Ray's actors
use, and only the coordinator's process counts.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import tpudist
from benchmarks.figures import Figure, at_most, at_most_times
from tpudist.coordinator.closure import Closure
from tpudist.coordinator.closure_queue import ClosureQueue
from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.coordinator.dispatcher import Dispatcher
from tpudist.coordinator.function_store import FunctionStore
from tpudist.coordinator.remote_value import RemoteValue
from tpudist.coordinator.worker import Completion
from tpudist.engine.call_line import CallLine, Reply
from tpudist.engine.call_listener import CallListener
from tpudist.engine.concurrency import SystemConcurrency
from tpudist.engine.engine import Actor

SUITE = "scheduled functions"
NUM_THREADS, NUM_LINES = (2, 16, 64, 256), (2, 16, 64)
TARGET_MS = 0.4
"""Most CPU time of a function, with 256 workers that are threads."""
GROWTH = 2.0
"""Most CPU time with the largest number of workers, as a multiple of the time with 2."""
_NUM_FUNCTIONS = 4000
_SECRET = b"only this benchmark"


def figures() -> Iterator[Figure]:
    """CPU time of a function, if all workers are busy, and if one function runs at a time."""
    for kind, counts in (("threads", NUM_THREADS), ("lines", NUM_LINES)):
        for mode in ("all busy", "one at a time"):
            times_ms = [_measure(kind, mode, count) for count in counts]
            for count, found_ms in zip(counts, times_ms, strict=True):
                subject = f"{count} workers as {kind}, {mode}"
                figure = Figure(SUITE, subject, "CPU of a function, ms", found_ms, times_ms[0])
                if kind == "threads" and count == counts[-1]:
                    yield at_most(figure, TARGET_MS)
                elif count == counts[-1]:
                    yield at_most_times(figure, GROWTH)
                else:
                    yield figure


def _measure(kind: str, mode: str, num_workers: int) -> float:
    # In a process of its own, because threads of workers stay until the end of a process.
    command = [sys.executable, "-m", "benchmarks.scale_coordinator", kind, mode, str(num_workers)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(found.stdout.splitlines()[-1])


def _time(schedule: Callable[[], RemoteValue], join: Callable[[], object], mode: str) -> float:
    """Returns milliseconds of CPU per function."""
    start_s = time.process_time()
    for _ in range(_NUM_FUNCTIONS):
        output = schedule()
        if mode == "one at a time":
            output.get()
    join()
    return 1e3 * (time.process_time() - start_s) / _NUM_FUNCTIONS


def _time_threads(mode: str, num_workers: int) -> float:
    strategy = tpudist.ParameterServerStrategy(num_workers=num_workers, num_servers=2)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = tpudist.Variable(0.0)

    def function() -> int:
        v.assign_add(1.0)
        return 1

    for _ in range(2):  # so that each worker has compiled
        for _ in range(2 * num_workers):
            coordinator.schedule(function)
        coordinator.join()
    return _time(lambda: coordinator.schedule(function), coordinator.join, mode)


class _LineEngine:
    """Actors that are stubs in another process, one connection each."""

    actors_may_hang = True

    def __init__(self, addresses: list[tuple[str, int]]):
        self.concurrency, self.serializer = SystemConcurrency(), None
        self._lines = [CallLine(address, _SECRET, pickle.Pickler) for address in addresses]

    def start(self) -> None:
        """Does nothing."""

    def spawn(self, role: str, index: int, factory: Callable[..., Any], *args: object) -> Actor:
        """Returns the stub with this number."""
        return Actor(role, index, 0)

    def call(self, actor: Actor, method: str, *args: object) -> tuple[CallLine, Reply]:
        """Sends a call."""
        line = self._lines[actor.index]
        return line, line.call((method, *args))

    def result(self, future: tuple[CallLine, Reply], timeout_s: float | None = None) -> Any:
        """Waits for an answer."""
        line, reply = future
        line.wait(reply, timeout_s)
        return reply.value(pickle.loads)

    def kill(self, actor: Actor, why: str = "") -> None:
        """Ends a connection."""
        self._lines[actor.index].close()


class _PickleSerializer:
    modules_by_value = ()
    loads = staticmethod(pickle.loads)
    dumps = staticmethod(pickle.dumps)


def _no_step() -> None:
    """Stands for a function of the program; the stubs do not run it."""


def _time_lines(mode: str, num_workers: int) -> float:
    command = [sys.executable, "-m", "benchmarks.scale_coordinator", "stubs", "", str(num_workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stubs:
        assert stubs.stdout is not None
        ports = stubs.stdout.readline().split()
        engine: Any = _LineEngine([("127.0.0.1", int(port)) for port in ports])
        queue = ClosureQueue(256 * num_workers, engine.concurrency)
        dispatcher = Dispatcher(engine, queue, lambda index: (Completion,))
        resources = dispatcher.resources
        functions = FunctionStore(_PickleSerializer(), resources.add, resources.remove)
        for _ in range(num_workers):
            dispatcher.add_worker()
        numbers = iter(range(2**62))

        def schedule() -> RemoteValue:
            output = RemoteValue(changed=queue.changed)
            closure = Closure(next(numbers), _no_step, (), {}, output, functions.store(_no_step))
            queue.put(closure)
            return output

        for _ in range(4 * num_workers):
            schedule()
        queue.wait()
        found_ms = _time(schedule, queue.wait, mode)
        stubs.kill()
    return found_ms


def _serve_stubs(num_workers: int) -> None:
    def answer(message: tuple[Any, ...]) -> object:
        return Completion(None, None, {}) if message[0] == "run" else None

    listeners = [
        CallListener("127.0.0.1", _SECRET, answer, repr, pickle.loads, pickle.Pickler)
        for _ in range(num_workers)
    ]
    print(*(listener.address[1] for listener in listeners), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(60)


if __name__ == "__main__":
    kind, mode, count = sys.argv[1:]
    if kind == "stubs":
        _serve_stubs(int(count))
    print((_time_threads if kind == "threads" else _time_lines)(mode, int(count)), flush=True)
    os._exit(0)  # threads of workers may still wait
