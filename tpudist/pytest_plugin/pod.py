"""Runs a user's program as several real processes on this machine, and injects faults.

Each process has emulated devices and its task in `TF_CONFIG`. A test can kill, stop or slow down
processes, disconnect them from each other, or let some run another program. All end with the block.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tpudist.pytest_plugin.fault import Fault
from tpudist.pytest_plugin.isolated_hosts import IsolatedHosts

_MAX_OUTPUT = 4000  # characters of the output of each process in an error
_POLL_S = 0.02
_EXIT_S = 5.0  # limit for the end of killed processes, which takes milliseconds


class PodError(AssertionError):
    """A process of a pod did not do what the test waited for; shows the last output of each.

    Remedy: Read the output of the processes. If they are only slow, use a larger `timeout_s`.
    """


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        exit_code: Exit code as in `subprocess`: -9 after SIGKILL. None if it was never started.
        output: Output to stdout and stderr.
    """

    exit_code: int | None
    output: str


class Pod(contextlib.AbstractContextManager["Pod"]):
    """Processes that run a program; see the fixture `tpudist_pod`. They start immediately.

    Args:
        program: Python file to run.
        *args: Arguments of the program.
        num_processes: Number of processes.
        devices_per_process: Number of emulated devices per process; or one number per process.
        faults: Faults to inject.
        programs: Different files for some processes.
        absent: Processes that never start.
        env: Additional environment variables.
        launch: Options of `tpudist launch`, such as `("--spares", "1")`, which then starts the
            processes: for programs that survive. None starts each process separately.
        hosts: Two hosts, used by even and odd processes; None for this host.
        timeout_s: Seconds after which all processes are killed.

    Raises:
        ValueError: If the numbers do not match, or `launch` does not support another argument.
    """

    def __init__(
        self,
        program: str | os.PathLike[str],
        *args: str,
        num_processes: int = 2,
        devices_per_process: int | Sequence[int] = 4,
        faults: Collection[Fault] = (),
        programs: Mapping[int, str | os.PathLike[str]] | None = None,
        absent: Collection[int] = (),
        env: Mapping[str, str] | None = None,
        launch: Sequence[str] | None = None,
        hosts: IsolatedHosts | None = None,
        timeout_s: float = 300,
    ):
        devices = (
            [devices_per_process] * num_processes
            if isinstance(devices_per_process, int)
            else list(devices_per_process)
        )
        if len(devices) != num_processes or num_processes < 1:
            raise ValueError(
                f"devices_per_process={devices_per_process} does not match {num_processes} "
                f"process(es). Pass one number, or one number per process."
            )
        if launch is not None and (programs or absent or hosts or len(set(devices)) > 1):
            raise ValueError(
                "launch=... starts the same program in all processes of this host. Omit "
                "programs, absent, separate_hosts and different numbers of devices."
            )
        self._folder = tempfile.TemporaryDirectory(prefix="tpudist-pod-")
        self._env = {**(env or {}), "PYTHONUNBUFFERED": "1"}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # with `launch`: 0 is the launcher
        self._count, self._hosts, self._is_launched = num_processes, hosts, launch is not None
        # Ends the processes of a test that hangs outside of the methods below, which have limits of
        # their own.
        self._timer = threading.Timer(timeout_s, self._time_out)
        self._timer.daemon = True
        self._timeout_s, self._has_timed_out, self._is_closed = timeout_s, False, False
        try:
            self._start_all(
                [os.fspath(program), *args], devices, faults, programs or {}, absent, launch
            )
        except BaseException:
            self._close()
            raise
        self._timer.start()

    # Faults that a test injects from outside.

    def kill(self, process: int) -> None:
        """Sends SIGKILL."""
        os.kill(self.pid(process), signal.SIGKILL)

    def stop(self, process: int) -> None:
        """Sends SIGSTOP: the process stops, but its connections stay open."""
        os.kill(self.pid(process), signal.SIGSTOP)

    def resume(self, process: int) -> None:
        """Sends SIGCONT."""
        os.kill(self.pid(process), signal.SIGCONT)

    def terminate(self, process: int) -> None:
        """Sends SIGTERM, like a host that is preempted."""
        os.kill(self.pid(process), signal.SIGTERM)

    def interrupt(self, process: int) -> None:
        """Sends SIGINT, like Ctrl-C."""
        os.kill(self.pid(process), signal.SIGINT)

    def unplug(self) -> None:
        """Disconnects the two hosts: no packet passes between them."""
        self._require_hosts().unplug()

    def plug_in(self) -> None:
        """Connects the two hosts again."""
        self._require_hosts().plug_in()

    # State and results.

    def pid(self, process: int) -> int:
        """Returns the process id of a process.

        Raises:
            PodError: If the process is not running.
        """
        if not self._is_launched:
            if process in self._processes and self._processes[process].poll() is None:
                return self._processes[process].pid
        else:
            # The environment has the number of the process; a replacement has a number of its own.
            # The variable is `processes.supervisor_variables.SUPERVISOR_VARIABLE`.
            for pid in self._children_of_launcher():
                if _variable(pid, "TPUDIST_SUPERVISOR").split()[-1:] == [str(process)]:
                    return pid
        raise PodError(self._describe(f"Process {process} is not running."))

    def output(self, process: int) -> str:
        """Returns the output of a process so far; with `launch`, the lines with its number."""
        if not self._is_launched:
            return self._read(process)
        # `tpudist launch` writes `[ 1] ` with the process before each line.
        lines = (line.partition("] ") for line in self._read(0).splitlines())
        return "\n".join(text for label, _, text in lines if label.strip("[ ") == str(process))

    def wait_for_line(self, process: int, text: str, timeout_s: float = 120) -> None:
        """Waits until a process has printed a text.

        Raises:
            PodError: If the process ends first, or takes longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while text not in self.output(process):
            popen = self._processes.get(0 if self._is_launched else process)
            # Reads again after `poll`: the process may have printed the text and ended since the
            # first read.
            if popen is None or (popen.poll() is not None and text not in self.output(process)):
                raise PodError(self._describe(f"Process {process} did not print {text!r}."))
            if time.monotonic() > deadline:
                raise PodError(self._describe(f"Process {process} did not print {text!r} in time."))
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float = 300) -> list[Ended]:
        """Waits until all processes have ended; returns their results in order.

        With `launch`, the only result belongs to `tpudist launch` itself.

        Raises:
            PodError: If some processes still run after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while running := [i for i, x in self._processes.items() if x.poll() is None]:
            if time.monotonic() > deadline:
                raise PodError(self._describe(f"{running} did not end within {timeout_s:g} s."))
            time.sleep(_POLL_S)
        if self._has_timed_out:
            raise PodError(
                self._describe(f"All processes were killed after {self._timeout_s:g} s.")
            )
        count = 1 if self._is_launched else self._count
        return [self._end_of(i) for i in range(count)]

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        """Ends all remaining processes; shows their output if the test fails."""
        if error is not None and not isinstance(error, PodError):
            error.add_note(self._describe("The pod, when this was raised:"))
        self._close()

    # Internals.

    def _start_all(
        self,
        command: Sequence[str],
        devices: Sequence[int],
        faults: Collection[Fault],
        programs: Mapping[int, str | os.PathLike[str]],
        absent: Collection[int],
        launch: Sequence[str] | None,
    ) -> None:
        faults_json = json.dumps([dataclasses.asdict(x) for x in faults])
        run = [sys.executable, "-m", "tpudist.pytest_plugin.faulty_program", faults_json]
        if launch is not None:
            options = ["-n", str(self._count), "--devices-per-process", str(devices[0])]
            words = [sys.executable, "-m", "tpudist", "launch", *options, *launch]
            self._start(0, [*words, *run, *command], {})
            return
        for i, (environment, prefix) in enumerate(self._places(devices)):
            if i not in absent:
                program = os.fspath(programs.get(i, command[0]))
                self._start(i, [*prefix, *run, program, *command[1:]], environment)

    def _end_of(self, i: int) -> Ended:
        if i not in self._processes:
            return Ended(None, "")
        return Ended(self._processes[i].returncode, self._read(i))

    def _places(self, devices: Sequence[int]) -> list[tuple[dict[str, str], Sequence[str]]]:
        prefixes = [self._hosts.prefix(i) if self._hosts else () for i in range(self._count)]
        names = [self._hosts.address(i) if self._hosts else "127.0.0.1" for i in range(self._count)]
        cluster = [f"{n}:{p}" for n, p in zip(names, _free_ports(self._count), strict=True)]
        return [
            (
                {
                    "TF_CONFIG": json.dumps(
                        {
                            "cluster": {"worker": cluster},
                            "task": {"type": "worker", "index": i},
                        }
                    ),
                    # As in `emulation.environment_of`.
                    "TPUDIST_EMULATE": str(n),
                    "JAX_PLATFORMS": "cpu",
                    "JAX_NUM_CPU_DEVICES": str(n),
                    "NPROC": str(max(32, 4 * n)),
                },
                prefixes[i],
            )
            for i, n in enumerate(devices)
        ]

    def _start(self, i: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        with (Path(self._folder.name) / str(i)).open("wb") as output:
            self._processes[i] = subprocess.Popen(
                command,
                env={**os.environ, **env, **self._env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, to kill its children with it
            )

    def _read(self, i: int) -> str:
        file = Path(self._folder.name) / str(i)
        return file.read_text(errors="replace") if file.exists() else ""

    def _describe(self, problem: str) -> str:
        stories = [problem]
        for i, process in self._processes.items():
            code = process.poll()
            state = "running" if code is None else f"exit code {code}"
            stories.append(f"=== process {i}: {state}\n{self._read(i)[-_MAX_OUTPUT:].strip()}")
        return "\n\n".join(stories)

    def _require_hosts(self) -> IsolatedHosts:
        if self._hosts is None:
            raise ValueError(
                "The processes are on one host. Pass separate_hosts=True to tpudist_pod."
            )
        return self._hosts

    def _time_out(self) -> None:
        self._has_timed_out = True
        self._kill_all()

    def _kill_all(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:  # otherwise another process may have this id by now
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        children = self._children_of_launcher()
        self._kill_all()
        for process in self._processes.values():
            process.wait()
        # The children of `tpudist launch` have groups of their own. Linux kills them when it ends.
        deadline = time.monotonic() + _EXIT_S
        while any(map(_is_running, children)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._folder.cleanup()

    def _children_of_launcher(self) -> list[int]:
        if not self._is_launched or 0 not in self._processes:
            return []
        return _children(self._processes[0].pid)


def _children(pid: int) -> list[int]:
    """Returns the child processes of a process, newest first; only on Linux."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, task.read_text().split())
    return sorted(children, reverse=True)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie, which its new parent has yet to reap


def _variable(pid: int, name: str) -> str:
    """Returns an environment variable at the start of a process; empty without it."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return next((x.partition("=")[2] for x in words if x.startswith(f"{name}=")), "")


def _free_ports(count: int) -> list[int]:
    # All sockets stay open until the end, so the ports differ.
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [x.getsockname()[1] for x in sockets]
