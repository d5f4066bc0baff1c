"""Runs a program as several processes on this host, and starts them again if that may help.

What is decided here is decided from exit codes, which docs/several_processes.md lists: a process
that raised (1) would raise again, and one that lost another one (75), was killed by a signal, or
was asked to end and saved (143), goes on from its checkpoint when it is started again.
"""

import contextlib
import dataclasses
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpudist.supervisor.worker_process import WorkerProcess
from tpudist.xla import runtime
from tpudist.xla.preemption_service import EXIT_PREEMPTED
from tpudist.xla.process_judge import EXIT_PEER_LOST

EXIT_GAVE_UP = 70
INTERRUPTED = 130
END_S = 15.0
"""How long the other processes may take to end by themselves, when one has failed."""
GRACE_S = 30.0
"""How long all may take to save, when this process is asked to end."""
_POLL_S = 0.02


@dataclasses.dataclass(frozen=True)
class Launch:
    """What to run.

    Attributes:
        command: The program and its arguments, of each process.
        num_processes: How many.
        devices_per_process: Emulated ones of each; None for what there is.
        restarts: How often all may be started again.
        write: Called with each line that a process prints, and its number; None is this one.
    """

    command: Sequence[str]
    num_processes: int
    devices_per_process: int | None
    restarts: int
    write: Callable[[int | None, str], None]

    def run(self) -> int:
        """Runs until all have ended well, or cannot go on; the exit code for this process."""
        with _signals() as asked:
            code = 0
            for attempt in range(self.restarts + 1):
                codes = self._run_once(asked)
                if asked:
                    return INTERRUPTED if asked[0] == signal.SIGINT else EXIT_PREEMPTED
                if not any(codes.values()):
                    return 0
                first, code = next((i, x) for i, x in codes.items() if x)
                told = f"process {first} has ended with exit code {code}"
                if not may_restart(code):
                    self.write(None, f"{told}: an error of the program, which would come again.")
                    return code if code > 0 else 1
                left = self.restarts - attempt
                if left:
                    self.write(None, f"{told}: all start again ({left} restart(s) left).")
                else:
                    self.write(None, f"{told}: given up.")
            return EXIT_GAVE_UP if self.restarts else code if code > 0 else 128 - code

    def _run_once(self, asked: list[int]) -> dict[int, int]:
        """The exit codes, in the order in which the processes have ended."""
        workers: list[WorkerProcess] = []
        try:
            for env in self._environments():
                workers.append(WorkerProcess(len(workers), self.command, env, self.write))
            return self._wait(workers, asked)
        finally:
            for worker in workers:
                worker.kill()

    def _environments(self) -> Iterator[dict[str, str]]:
        cluster = {"worker": [f"127.0.0.1:{port}" for port in _free_ports(self.num_processes)]}
        devices = self.devices_per_process
        for index in range(self.num_processes):
            task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            yield {"TF_CONFIG": json.dumps(task)} | (emulation(devices) if devices else {})

    def _wait(self, workers: Sequence[WorkerProcess], asked: list[int]) -> dict[int, int]:
        codes: dict[int, int] = {}
        deadline, forwarded = float("inf"), False
        while len(codes) < len(workers):
            for worker in workers:
                code = worker.exit_code
                if code is not None and worker.index not in codes:
                    codes[worker.index] = code
                    if code:
                        deadline = min(deadline, time.monotonic() + END_S)
            if asked and not forwarded:
                forwarded = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
                for worker in workers:
                    worker.send(signal.Signals(asked[0]))
            if time.monotonic() > deadline or len(asked) > 1:
                for worker in workers:
                    if worker.exit_code is None:
                        self.write(None, f"process {worker.index} does not end, and is killed.")
                        worker.kill()
            time.sleep(_POLL_S)
        return codes


def emulation(num_devices: int) -> dict[str, str]:
    """The environment of a process of emulated devices."""
    return {
        "TPUDIST_EMULATE": str(num_devices),
        "JAX_PLATFORMS": "cpu",  # for programs that do not call tpudist.emulate
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "NPROC": str(runtime.num_threads(num_devices)),
    }


def may_restart(exit_code: int) -> bool:
    """Whether a process that has ended so may do better when it is started again."""
    return exit_code < 0 or exit_code in (EXIT_PEER_LOST, EXIT_PREEMPTED)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that ask this process to end, as they come."""
    asked: list[int] = []
    before: dict[int, Any] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, lambda number, frame: asked.append(number))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held until the last is found, so that they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
