"""Runs of a `ClusterCoordinator` with workers and servers that fail, judged by what took effect."""

from __future__ import annotations

import random
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simulation.actors import SimulatedEngine, here
from simulation.faults import Fault, Kind, draw, inject
from simulation.outcomes import Outcome
from simulation.process import Process
from simulation.simulation import Simulation
from tpudist.context.closure_place import current_place
from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.ps.changes import Assignment
from tpudist.ps.servers import Home, Servers
from tpudist.ps.worker_session import WorkerSession

KINDS = (
    Kind.CRASH,
    Kind.POWER_OFF,
    Kind.STOP,
    Kind.BUSY,
    Kind.SLOW_LINK,
    Kind.SPLIT,
    Kind.CLOCK_JUMP,
)
PER_WORKER = 10
FUNCTION_S = 1.0
TIMEOUT_S = 30.0
_LIMIT_S = 3000.0


class SimulatedStrategy:
    """The part of a strategy that a coordinator uses; see `ServerStrategy`."""

    def __init__(self, engine: Any, num_workers: int, num_servers: int, log: str | None):
        self.engine, self.num_workers = engine, num_workers
        self.servers = Servers(engine, num_servers, log, TIMEOUT_S)
        self.coordinator: weakref.ref[Any] | None = None
        self.num_numbered = 0

    def make_session_factory(self) -> Callable[[int], WorkerSession]:
        """Returns what creates the session of a worker."""
        return lambda index: WorkerSession(self.engine, None, None)

    def shutdown(self) -> None:
        """Ends the servers."""
        self.servers.close()
        self.engine.shutdown()


def add_one(homes: Sequence[Home], seconds: float) -> int:
    """The scheduled function: adds one to a variable of each server."""
    place = current_place()
    assert place is not None
    here().sleep(seconds)
    for home in homes:
        place.state.record_change(home, Assignment(home.number, "add", np.ones(())))
    return place.worker


class ScheduledRun:
    """A coordinator that schedules functions on workers.

    Args:
        num_workers: Number of workers.
        num_servers: Number of servers.
        seed: Seed of the simulation.
        log: Folder of the servers' logs; None for no logs.
        per_worker: Number of functions for each worker.
        options: Options of the coordinator.

    Attributes:
        simulation: The simulation; its process is the program.
        engine: Runs the actors.
        sums: At the end, the value of the variable of each server.
        has_joined: Whether all functions have finished.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int = 2,
        seed: int = 0,
        *,
        log: str | None = None,
        per_worker: int = PER_WORKER,
        **options: Any,
    ):
        self.simulation = Simulation(0, seed)
        self.program = Process(self.simulation, 0, 1, 0)
        self.simulation.processes = [self.program]
        self.engine = SimulatedEngine(self.simulation)
        self.num_functions = num_workers * per_worker
        self.sums: list[float] = []
        self.has_joined = False
        self.num_servers, self.num_workers = num_servers, num_workers
        self._log, self._options = log, options

    def start(self) -> None:
        """Starts the program."""
        self.program.run(lambda process: self._run())

    def _run(self) -> None:
        strategy = SimulatedStrategy(self.engine, self.num_workers, self.num_servers, self._log)
        coordinator = ClusterCoordinator(strategy, **self._options)  # type: ignore[arg-type]
        servers = strategy.servers
        homes = [servers.define(f"v{i}", np.zeros(()), None, i) for i in range(self.num_servers)]
        try:
            for _ in range(self.num_functions):
                coordinator.schedule(add_one, (homes, FUNCTION_S))
            self.has_joined = coordinator.join()
            self.sums = [float(servers.read(home)) for home in homes]
            self.program.has_finished = True
        finally:
            coordinator.shutdown()


def run(
    seed: int,
    num_workers: int | None = None,
    kind: Kind | None = None,
    num_faults: int | None = None,
) -> tuple[Outcome, list[Process]]:
    """Returns how a run ended, its program and its actors; see `outcomes.run`.

    Each worker or server may have a fault. The program itself has none: its end ends the run.
    """
    generator = random.Random(seed)
    num_workers, num_servers = num_workers or generator.choice((2, 3, 8)), generator.choice((1, 2))
    if num_faults is None:
        num_faults = generator.choices((0, 1, 2, 3), (1, 5, 3, 2))[0]
    kinds = KINDS if kind is None else (kind,)
    drawn = [draw(generator, num_workers + num_servers, kinds, 0.1) for _ in range(num_faults)]
    options: dict[str, Any] = {"closure_timeout_s": TIMEOUT_S}
    if generator.random() < 0.3:
        options["speculate"] = 3.0
    if generator.random() < 0.3:
        options["max_staleness"] = generator.choice((0, 4))
    with tempfile.TemporaryDirectory() as log:
        return run_with(ScheduledRun(num_workers, num_servers, seed, log=log, **options), drawn)


def run_with(scheduled: ScheduledRun, drawn: Sequence[Fault]) -> tuple[Outcome, list[Process]]:
    """Returns how a run with certain faults ended. Servers have the first numbers."""
    simulation, num_servers = scheduled.simulation, scheduled.num_servers

    def find(fault: Fault) -> Process | None:
        is_server = fault.process < num_servers
        role = ("ps", fault.process) if is_server else ("worker", fault.process - num_servers)
        actors = [x for a, x in scheduled.engine.actors.items() if (a.role, a.index) == role]
        return actors[-1] if actors else None

    inject(simulation, drawn, find)
    scheduled.start()
    has_ended = simulation.go_on(_LIMIT_S)
    problems = [x for x in scheduled.program.defects]
    if not has_ended:
        problems.append("the program has not ended")
    if not scheduled.has_joined:
        problems.append(f"not all functions have finished: {scheduled.program.printed[-1:]}")
    elif scheduled.sums != [scheduled.num_functions] * num_servers:
        problems.append(f"{scheduled.num_functions} functions have added {scheduled.sums}")
    outcome = Outcome.of(simulation, drawn, "", problems, [scheduled.program])
    return outcome, [scheduled.program, *scheduled.engine.actors.values()]
