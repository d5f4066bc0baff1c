"""Steps per second and CPU time of parameter servers: ours, TensorFlow's, and by hand on Ray.

Two workers and one server train the same task in each system, on this machine. Systems take turns,
a number of steps each time, and a figure is the median over the turns. The CPU time includes all
processes of a system, also Ray's own. Other programs on the machine change it less than the rate.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import process_times
from benchmarks.figures import Figure, at_least_times, at_most, at_most_times

SUITE = "servers"
NUM_TURNS = 5
STEPS = {"mlp": 200, "embedding": 100}
SUBJECTS = {
    "mlp": "an MLP of 235 thousand parameters, batches of 64",
    "embedding": "5,120 rows of an embedding table of 102 MB",
}
BY_HAND, TENSORFLOW = "Ray by hand", "TensorFlow"
RAY_CPU_MS = 15.9
"""CPU milliseconds per MLP step of a hand-written loop on Ray, from before the engine existed."""
# XLA computes on one thread: the threads of all processes would compete for few cores.
_FLAGS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}


class System:
    """A program that runs steps on request, and all processes that it has started."""

    def __init__(self, name: str, command: Sequence[str]):
        """Starts the program and waits until it is ready."""
        self.name, self._mark = name, uuid.uuid4().hex
        scripts = Path(__file__).parent.parent
        paths = [str(scripts), str(scripts.parent), os.environ.get("PYTHONPATH", "")]
        variables = {process_times.MARK: self._mark}
        if name == TENSORFLOW:
            variables["TF_NUM_INTRAOP_THREADS"] = "1"
        else:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            command,
            env=os.environ | _FLAGS | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self, num_steps: int) -> tuple[float, float]:
        """Returns the steps per second, and the CPU milliseconds of a step."""
        before_s = process_times.cpu_s(self._mark)
        assert self._process.stdin is not None
        print(num_steps, file=self._process.stdin, flush=True)
        seconds, _ = self._answer()
        cpu_s = process_times.cpu_s(self._mark) - before_s
        return num_steps / seconds, 1e3 * cpu_s / num_steps

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # A library may print other lines, which are not JSON.
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}; see above.")

    def close(self) -> None:
        """Ends all processes of the system."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for pid in process_times.pids(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def figures(tensorflow_python: Path | None) -> Iterator[Figure]:
    """Yields the figures of both tasks."""
    if tensorflow_python is None:
        print("TensorFlow is left out of the suite servers: see --tensorflow-python.")
    for task in STEPS:
        yield from _of_task(task, tensorflow_python)


def _of_task(task: str, tensorflow_python: Path | None) -> Iterator[Figure]:
    folder = Path(__file__).parent
    commands = {
        "threads": [sys.executable, str(folder / "server_steps.py"), task, "threads"],
        "ray": [sys.executable, str(folder / "server_steps.py"), task, "ray"],
        BY_HAND: [sys.executable, str(folder / "server_steps_on_ray.py"), task],
    }
    if tensorflow_python is not None:
        program = str(folder / "server_steps_on_tensorflow.py")
        commands[TENSORFLOW] = [str(tensorflow_python), program, task]
    with contextlib.ExitStack() as stack:
        systems = []
        for name, command in commands.items():
            systems.append(system := System(name, command))
            stack.callback(system.close)  # also if the next system does not start
        turns = [{x.name: x.run(STEPS[task]) for x in systems} for _ in range(NUM_TURNS + 1)]
        turns = turns[1:]  # the first one includes compilation
    rates = {name: [turn[name][0] for turn in turns] for name in commands}
    cpu_ms = {name: [turn[name][1] for turn in turns] for name in commands}

    def figure(what: str, found: dict[str, list[float]], engine: str, other: str) -> Figure:
        ours, theirs = (statistics.median(found[name]) for name in (engine, other))
        quantity = f"{what}, engine {engine}, against {other}"
        return Figure(SUITE, SUBJECTS[task], quantity, ours, theirs, details={"turns": found})

    for engine in ("threads", "ray"):
        for other in (name for name in (TENSORFLOW, BY_HAND) if name in commands):
            rate = figure("steps/s", rates, engine, other)
            cpu = figure("CPU-ms a step", cpu_ms, engine, other)
            if other == TENSORFLOW:
                rate = at_least_times(rate, 4.0 if engine == "threads" else 1.0)
                cpu = at_most_times(cpu, 1.0)
            elif engine == "ray" and task == "mlp":
                cpu = at_most(cpu, RAY_CPU_MS)
            yield from (rate, cpu)
