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

Reports go through a file because Gloo prints to stdout from C++. When one process fails, its peers
would wait for it for minutes: all are killed at once, and the error shows what each printed last.
"""

from __future__ import annotations

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULT_FILE = "TPUDIST_TEST_RESULT"
TAIL_CHARACTERS = 4000  # of each stream of each process in an error: a traceback through JAX fits


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process that ended with exit code 0: what it printed and what it gave to `report`."""

    stdout: str
    stderr: str
    result: Any


def report(value: Any) -> None:
    """Called by the program: hands `value`, which JSON must be able to say, to the test.

    Of several calls in one process the last one counts.
    """
    Path(os.environ[RESULT_FILE]).write_text(json.dumps(value))


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
        devices_per_process: What each process finds in `TPUDIST_EMULATE`.
        args: Command line arguments, the same for every process.
        timeout_s: For all processes together, start-up included.
        python: The interpreter.

    Returns:
        One `Finished` per process, in the order of their task indices.

    Raises:
        AssertionError: A process ended with another exit code than 0, or some were still running
            after `timeout_s`. Holds the last output of every process. None is left running.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = _as_file(program, Path(folder))
        command = [python, str(file), *args]
        workers = _start(command, num_processes, devices_per_process, Path(folder))
        try:
            problem = _wait(workers, timeout_s)
        finally:
            for worker in workers:
                worker.kill()
        if problem:
            raise AssertionError("\n\n".join([problem, *(worker.story() for worker in workers)]))
        return [worker.finished() for worker in workers]


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
        return Finished(self._output("stdout"), self._output("stderr"), result)

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
    command: Sequence[str], num_processes: int, devices_per_process: int, folder: Path
) -> list[_Worker]:
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(num_processes)]
    tests = Path(__file__).resolve().parent
    workers = []
    for index in range(num_processes):
        own = folder / str(index)
        own.mkdir()
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        env = os.environ | {
            "TF_CONFIG": json.dumps(task),
            "TPUDIST_EMULATE": str(devices_per_process),
            RESULT_FILE: str(own / "result"),
            "PYTHONPATH": os.pathsep.join(
                [str(tests.parent), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "PYTHONUNBUFFERED": "1",  # so that a killed process has shown what it printed
        }
        with (own / "stdout").open("wb") as stdout, (own / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # its own group, so that its children die with it
            )
        workers.append(_Worker(index, process, own))
    return workers


def _wait(workers: Sequence[_Worker], timeout_s: float) -> str | None:
    """Waits until all ended well or one did not; returns what went wrong."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = {worker.index: worker.process.poll() for worker in workers}
        failed = [f"process {i} with exit code {code}" for i, code in codes.items() if code]
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
