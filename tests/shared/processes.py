"""Starts real Python processes that form one cluster, for tests of what crosses a process boundary.

The two-by-four helper: two processes with four emulated devices each. A program learns its place
from `TF_CONFIG` (all workers on the loopback address, this worker's index) and the number of its
devices from `TPUDIST_EMULATE`, as a user's program does; what the test shall know goes to `report`:

    results = run_processes('''
        import tpudist
        from processes import report
        tpudist.emulate()
        strategy = tpudist.MultiWorkerMirroredStrategy()
        report(strategy.num_replicas_in_sync)
    ''')
    assert [r.result for r in results] == [8, 8]

For programs that tests end, or that end with another exit code, `start_processes` gives the
running processes: `signal` one of them, `say` when it has come to a place, `wait` for all.

Reports go through a file because Gloo prints to stdout from C++. When one process fails, its peers
would wait for it for minutes: all are killed at once, and the error shows what each printed last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from places import PYTHONPATH

RESULT_FILE = "TPUDIST_TEST_RESULT"
TAIL_CHARACTERS = 4000  # of each stream of each process in an error: a traceback through JAX fits


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process that ended: what it printed, what it gave to `report`, and its exit code.

    As in `subprocess`, an exit code of -9 is the signal that ended it.
    """

    stdout: str
    stderr: str
    result: Any
    exit_code: int = 0


@dataclasses.dataclass(frozen=True)
class Host:
    """Host of a process: a command prefix that runs a program there, and its address."""

    prefix: Sequence[str] = ()
    address: str = "127.0.0.1"


def report(value: Any) -> None:
    """Called by the program: hands `value`, which JSON must be able to say, to the test.

    Of several calls in one process the last one counts.
    """
    Path(os.environ[RESULT_FILE]).write_text(json.dumps(value))


def say(word: str) -> None:
    """Called by the program: lets the test know that it has come to a place."""
    (Path(os.environ[RESULT_FILE]).parent / f"said {word}").touch()


def run_processes(
    program: str | Path,
    *,
    num_processes: int = 2,
    devices_per_process: int = 4,
    args: Sequence[str] = (),
    timeout_s: float = 180,
    python: str = sys.executable,
) -> list[Finished]:
    """Runs `program` once per process of a new cluster and waits for all of them.

    Args:
        program: Source text (may be indented) or the path of a Python file.
        num_processes: Workers in the cluster; process 0 is the coordinator.
        devices_per_process: `TPUDIST_EMULATE` of each process.
        args: Command line arguments, the same for every process.
        timeout_s: For all processes together, start-up included.
        python: The interpreter.

    Returns:
        One `Finished` per process, in the order of their task indices.

    Raises:
        AssertionError: A process ended with another exit code than 0, or some were still running
            after `timeout_s`. Holds the last output of every process. None is left running.
    """
    with start_processes(
        program,
        num_processes=num_processes,
        devices_per_process=devices_per_process,
        args=args,
        python=python,
    ) as running:
        return running.wait(timeout_s)


@contextlib.contextmanager
def start_processes(
    program: str | Path,
    *,
    num_processes: int = 2,
    devices_per_process: int = 4,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    hosts: Sequence[Host] = (),
    python: str = sys.executable,
) -> Iterator[Running]:
    """Starts `program` once per process of a new cluster; none is left running after the block.

        with start_processes(program) as running:
            running.wait_until_said(1, "at step 3")  # the program called say("at step 3")
            running.signal(1, signal.SIGTERM)
            first, second = running.wait(exit_codes=(143,))

    Args:
        program: Same as in `run_processes`, as are the others.
        num_processes: Workers in the cluster.
        devices_per_process: Emulated devices of each process.
        args: Command line arguments.
        env: More environment variables, for all processes.
        hosts: Host of each process (default: this host).
        python: The interpreter.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = _as_file(program, Path(folder))
        command = [python, str(file), *args]
        hosts = hosts or [Host()] * num_processes
        workers = _start(command, hosts, devices_per_process, Path(folder), env or {})
        try:
            yield Running(workers)
        finally:
            for worker in workers:
                worker.kill()


@dataclasses.dataclass
class Running:
    """Processes that may still be running."""

    workers: list[_Worker]

    def signal(self, index: int, number: int) -> None:
        """Sends the process `index` a signal; not its children. SIGKILL included."""
        self.workers[index].process.send_signal(number)

    def wait_until_said(self, index: int, word: str, timeout_s: float = 120) -> None:
        """Returns when the process `index` has called `say(word)`.

        Raises:
            AssertionError: If the process ended, or took longer; contains the last output of all.
        """
        file, process = self.workers[index].folder / f"said {word}", self.workers[index].process
        deadline = time.monotonic() + timeout_s
        while not file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(self._stories(f"Process {index} did not say {word!r}."))
            time.sleep(0.005)

    def wait(self, timeout_s: float = 180, exit_codes: Collection[int] = (0,)) -> list[Finished]:
        """Waits for all to end.

        Args:
            timeout_s: For all together, from now on.
            exit_codes: Expected exit codes, such as 143 or -9; after any other code, the other
                processes are killed at once.

        Raises:
            AssertionError: As `run_processes`.
        """
        problem = _wait(self.workers, timeout_s, exit_codes)
        if problem:
            for worker in self.workers:
                worker.kill()
            raise AssertionError(self._stories(problem))
        return [worker.finished() for worker in self.workers]

    def _stories(self, problem: str) -> str:
        return "\n\n".join([problem, *(worker.story() for worker in self.workers)])


@dataclasses.dataclass
class _Worker:
    index: int
    process: subprocess.Popen
    folder: Path
    was_killed: bool = False

    def kill(self) -> None:
        """Ends the process and whatever it started; does nothing when it has ended."""
        if self.process.poll() is None:
            self.was_killed = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def finished(self) -> Finished:
        file = self.folder / "result"
        result = json.loads(file.read_text()) if file.exists() else None
        code = self.process.returncode
        return Finished(self._output("stdout"), self._output("stderr"), result, code)

    def story(self) -> str:
        end = "killed by this helper" if self.was_killed else f"exit code {self.process.returncode}"
        streams = (
            f"--- process {self.index} {name}:\n{self._output(name)[-TAIL_CHARACTERS:].strip()}"
            for name in ("stdout", "stderr")
        )
        return "\n".join([f"=== process {self.index}: {end}", *streams])

    def _output(self, stream: str) -> str:
        return (self.folder / stream).read_text(errors="replace")


def _as_file(program: str | Path, folder: Path) -> Path:
    if isinstance(program, Path):
        return program.resolve()
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program))
    return file


def _start(
    command: Sequence[str],
    hosts: Sequence[Host],
    devices_per_process: int,
    folder: Path,
    more_env: Mapping[str, str],
) -> list[_Worker]:
    ports = _free_ports(len(hosts))
    addresses = [f"{host.address}:{port}" for host, port in zip(hosts, ports, strict=True)]
    workers = []
    for index, host in enumerate(hosts):
        own = folder / str(index)
        own.mkdir()
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        env = os.environ | {
            "TF_CONFIG": json.dumps(task),
            "TPUDIST_EMULATE": str(devices_per_process),
            RESULT_FILE: str(own / "result"),
            "PYTHONPATH": os.pathsep.join(
                [PYTHONPATH, *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "PYTHONUNBUFFERED": "1",  # so that a killed process has shown what it printed
            **more_env,
        }
        with (own / "stdout").open("wb") as stdout, (own / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [*host.prefix, *command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # its own group, so that its children die with it
            )
        workers.append(_Worker(index, process, own))
    return workers


def _wait(workers: Sequence[_Worker], timeout_s: float, well: Collection[int]) -> str | None:
    """Waits until all ended well or one did not; returns what went wrong."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = {worker.index: worker.process.poll() for worker in workers}
        failed = [
            f"process {i} with exit code {code}"
            for i, code in codes.items()
            if code not in (None, *well)
        ]
        if failed:
            return f"Of {len(workers)} processes these failed first: {', '.join(failed)}."
        running = [str(i) for i, code in codes.items() if code is None]
        if not running:
            return None
        if time.monotonic() > deadline:
            return (
                f"Of {len(workers)} processes these were still running after {timeout_s:g} s: "
                f"{', '.join(running)}."
            )
        time.sleep(0.02)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held until the last is found, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
