"""Runs that `tpudist launch` starts: a supervisor on each host, which starts and watches processes.

The supervisors run `supervisor.launch` and what it calls; only the operating system's
part is a model: child processes and signals.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from simulation.connections import address_of
from simulation.process import Process
from simulation.simulation import Simulation
from simulation.training import make_mesh
from tpudist.checkpoint import Checkpoint
from tpudist.preemption.survival.supervised_process import SupervisedProcess
from tpudist.preemption.survival.survivor import Survivor
from tpudist.processes import process_agreement, supervisor_variables
from tpudist.processes.host import this_host
from tpudist.processes.process_agreement import Intention
from tpudist.supervisor.hosts import Hosts
from tpudist.supervisor.launch import Launch

SUPERVISOR_PORT = 8470
Program = Callable[[Process], None]


class Child:
    """A process of a supervisor; see `supervisor.worker_process.Worker`."""

    def __init__(self, process: Process):
        self.process = process
        self.index = process.index

    @property
    def exit_code(self) -> int | None:
        """Exit code."""
        return self.process.exit_code

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped."""
        return self.process.is_stopped and self.exit_code is None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        if self.exit_code is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kills it."""
        self.process.end(-signal.SIGKILL)


class ChildWakeups:
    """Wakes a supervisor when one of its processes ends, or when it receives a signal."""

    def __init__(self, supervisor: Process):
        self.signals: list[int] = []
        self._supervisor = supervisor
        self._arrived = supervisor.event()
        for number in (signal.SIGTERM, signal.SIGINT):
            supervisor.set_signal_handler(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.signals.append(number)
        self.wake()

    def wake(self) -> None:
        """Ends the next wait."""
        self._arrived.set()

    def wait(self, timeout_s: float) -> bool:
        """Waits."""
        has_arrived = self._arrived.wait(timeout_s)
        self._arrived = self._supervisor.event()
        return has_arrived


class LaunchedRun:
    """A run with a supervisor on each host.

    Args:
        num_hosts: Number of hosts.
        per_host: Number of processes of each host.
        program: Program of the processes.
        seed: Seed of the simulation.
        spares: Additional processes of each host.
        restarts: Number of restarts.

    Attributes:
        simulation: The simulation; its `processes` are the supervisors.
        workers: All processes that supervisors have started.
        lines: Lines of the supervisors about the run.
        per_host: Number of processes of each host.
    """

    def __init__(
        self,
        num_hosts: int,
        per_host: int,
        program: Program,
        seed: int = 0,
        *,
        spares: int = 0,
        restarts: int = 0,
        collectives_fail: bool = True,
    ):
        self.simulation = Simulation(0, seed, collectives_fail=collectives_fail)
        self.simulation.processes = [
            Process(self.simulation, -1 - place, 0, place) for place in range(num_hosts)
        ]
        self.workers: list[Process] = []
        self.lines: list[str] = []
        self._names = [address_of(place) for place in range(num_hosts)]
        self.per_host, self._program = per_host, program
        self._spares, self._restarts = spares, restarts

    @property
    def supervisors(self) -> list[Process]:
        """The supervisors, by host."""
        return self.simulation.processes

    def start(self) -> None:
        """Starts the supervisors."""
        for supervisor in self.supervisors:
            supervisor.run(self._supervise)

    def _supervise(self, supervisor: Process) -> None:
        wakeups = ChildWakeups(supervisor)
        port = SUPERVISOR_PORT if len(self._names) > 1 else 0

        def start(
            index: int, command: Sequence[str], env: Mapping[str, str], write: object
        ) -> Child:
            process = Process(self.simulation, index, 0, supervisor.place, supervisor)
            process.environ.update(env)
            process.ended = wakeups.wake
            self.workers.append(process)
            process.run(self._program)
            return Child(process)

        def write(index: int | None, line: str) -> None:
            supervisor.printed.append(line)
            self.lines.append(line)

        launch = Launch(
            ["program"],
            self.per_host,
            None,
            self._restarts,
            write,
            self._spares,
            Hosts(self._names, supervisor.place, port),
            start,
        )
        raise SystemExit(launch.run_attempts(wakeups, ""))


def surviving_training(
    steps: int, step_s: float, fault: Callable[[Process, int], None] = lambda process, step: None
) -> Program:
    """Returns a program that trains in `survive`: each step is one program of all processes.

    Its state is the number of steps, and the sum of their numbers, which a lost or repeated step
    would change.
    """

    def train(survivor: Survivor) -> float:
        process = this_host()
        assert isinstance(process, Process)
        runtime = process.runtime
        assert runtime is not None
        mesh = make_mesh(runtime.count)
        process_agreement.watch(mesh)
        state = Checkpoint(sums={"steps": np.zeros((), np.int64), "sum": np.zeros((), np.int64)})
        survivor.restore(state)
        sums = state.checkpoint_objects()["sums"]
        while sums["steps"] < steps:
            step = int(sums["steps"])
            fault(process, step)
            process_agreement.agree_once(
                mesh, "train", lambda: Intention("Strategy.run of 'train'")
            )
            runtime.collectives.run(process, step)
            process.sleep(step_s)
            sums["steps"] += 1
            sums["sum"] += step
            process.progress = step + 1
            survivor.commit(state)
        return int(sums["sum"])

    def run(process: Process) -> None:
        supervisor = process.environ[supervisor_variables.SUPERVISOR_VARIABLE]
        process.result = SupervisedProcess(train, 1, None, True, supervisor).run()
        process.has_finished = True

    return run
