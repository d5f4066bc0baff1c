"""Runs of `survival_program.py` under `tpudist launch`, with faults, and their outcomes."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from places import PROGRAMS, ROOT

COMMAND = [sys.executable, str(PROGRAMS / "launch_program.py"), "launch"]
LIMIT_S = 150
STEPS = 40


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


class Run:
    """A run in progress."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        output: str = "output",
        program: Path = PROGRAMS / "survival_program.py",
    ):
        """Starts it: STEPS, FAULT and so on are in `env`; `prefix` runs it on another host."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.output_file = folder / output
        more = {"OUT": str(folder), "PYTHONPATH": str(ROOT), "STEPS": str(STEPS)}
        more |= env or {}
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, *COMMAND, *options, str(program)],
                env=os.environ | more,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self) -> list[dict[str, Any]]:
        """Lines that all processes have written so far, in order of time."""
        found = []
        for file in self.folder.glob("*.jsonl"):
            for line in file.read_text().splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:  # half of a line
                    pass
        return sorted(found, key=lambda x: x["time"])

    def pids(self) -> dict[int, int]:
        """The living processes of the newest generation, by rank."""
        lines = self.lines()
        newest = max((x["generation"] for x in lines), default=0)
        pids = {x["rank"]: x["pid"] for x in lines if x["generation"] == newest}
        return {rank: pid for rank, pid in sorted(pids.items()) if is_running(pid)}

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.output()}"
            time.sleep(0.01)

    def wait_for_step(self, step: int, *, of_all: bool = False) -> None:
        """Returns when a step was made: by one process, or all of the newest generation."""

        def is_there() -> bool:
            lines = self.lines()
            newest = max((x["generation"] for x in lines), default=0)
            ranks = {x["rank"] for x in lines if x["step"] >= step and x["generation"] == newest}
            count = max((x["processes"] for x in lines if x["generation"] == newest), default=0)
            return len(ranks) >= count > 0 if of_all else any(x["step"] >= step for x in lines)

        self.wait_for(is_there, f"step {step}")

    def signal(self, rank: int, number: signal.Signals) -> int:
        """Sends a signal to the process of a rank; its pid."""
        pid = self.pids()[rank]
        os.kill(pid, number)
        return pid

    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def wait(self) -> "Seen":
        """Waits for the end; nothing is left running."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pids = {x["pid"] for x in self.lines()}
            self.close()
            raise AssertionError(f"{pids} did not end:\n{self.output()[-12000:]}") from None
        ended = time.monotonic()
        left = {x["pid"] for x in self.lines()}
        while any(map(is_running, left)):
            assert time.monotonic() - ended < 20, f"still running: {set(filter(is_running, left))}"
            time.sleep(0.01)
        return Seen(code, self.output(), self.lines())

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass
class Seen:
    """Outcome of a run.

    Attributes:
        code: Exit code.
        output: Printed output.
        lines: Lines that all processes have written.
    """

    code: int
    output: str
    lines: list[dict[str, Any]]

    def losses(self) -> dict[int, str]:
        """Bits of the loss of each step; the same in all processes and generations."""
        found: dict[int, set[str]] = defaultdict(set)
        for x in self.lines:
            found[x["step"]].add(x["loss"])
        assert all(len(losses) == 1 for losses in found.values()), found
        return {step: losses.pop() for step, losses in found.items()}

    def examples(self) -> dict[int, list[int]]:
        """Examples of each step in its last generation, of all processes."""
        by_generation: dict[int, dict[int, dict[int, list[int]]]] = defaultdict(dict)
        counts = {}
        for x in self.lines:
            by_generation[x["step"]].setdefault(x["generation"], {})[x["rank"]] = x["ids"]
            counts[x["generation"]] = x["processes"]
        found = {}
        for step, generations in by_generation.items():
            whole = [g for g, ranks in generations.items() if len(ranks) == counts[g]]
            if whole:
                ids = generations[max(whole)]
                found[step] = sorted(i for rank in ids.values() for i in rank)
        return found

    def seconds_to_new_step(self, since: float) -> float:
        """From a time to the first step that nobody had made before."""
        most = max((x["step"] for x in self.lines if x["time"] <= since), default=0)
        return min(x["time"] for x in self.lines if x["step"] > most) - since


KINDS = (
    "kill",
    "kill the first",
    "two at once",
    "again while they join",
    "stop",
    "raise",
    "wrong program",
    "slow reader",
    "die before it joins",
)


@dataclasses.dataclass
class Fault:
    """Faults of a run.

    Attributes:
        kind: One of `KINDS`.
        count: Number of processes.
        spares: Number of spare processes.
        times: Times of the faults.
    """

    kind: str
    count: int
    spares: int
    times: list[float]


def run_with_fault(folder: Path, seed: int, **env: str) -> tuple[Fault, Seen]:
    """A run of 2 to 4 processes, with the fault of a seed; `env` is for the program."""
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    count = chance.choice((2, 4, 4)) if "two" not in kind else 4
    spares = 1 if kind == "die before it joins" else chance.choice((0, 1, 1))
    step = chance.randrange(8, 25)
    victim = chance.randrange(count)
    inside = kind in ("raise", "wrong program", "slow reader")
    fault = {"kind": kind, "process": victim, "step": step} if inside else {}
    if kind == "die before it joins":
        fault = {"kind": kind, "process": count}
    options = ("-n", count, "--devices-per-process", 2, "--spares", spares, "--restarts", 4)
    done = Fault(kind, count, spares, [])
    with Run(folder, *map(str, options), env={"FAULT": json.dumps(fault), **env}) as run:
        if not inside:
            run.wait_for_step(step, of_all=True)
            ranks = sorted(run.pids())
            number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
            victims = [chance.choice(ranks)]
            if kind == "kill the first":
                victims = [0]
            elif kind == "two at once":
                victims = chance.sample(ranks, 2)
            pids = [run.pids()[rank] for rank in victims]
            done.times.append(time.time())
            for pid in pids:
                os.kill(pid, number)
            if kind == "again while they join" and count == 4:
                time.sleep(chance.random())
                left = [x for rank, x in run.pids().items() if x not in pids]
                done.times.append(time.time())
                os.kill(chance.choice(left or list(run.pids().values())), signal.SIGKILL)
        return done, run.wait()


def require_same_numbers(seen: Seen, calm: Seen) -> None:
    """Each step has the loss of a run without faults, to the bit, and the same examples."""
    expected = calm.losses()
    found = seen.losses()
    assert sorted(found) == sorted(expected), seen.output
    assert {step for step in found if found[step] != expected[step]} == set()
    examples, all_examples = seen.examples(), calm.examples()
    known = [step for step in examples if step % 4]  # the others are padded, by number of devices
    assert len(known) > 23  # of 30
    assert all(examples[step] == all_examples[step] for step in known)


def require_outcome(fault: Fault, seen: Seen, calm: Seen) -> None:
    """The fault was survived, without another number, or named by all."""
    if fault.kind == "raise":
        assert seen.code == 1, seen.output
        assert seen.output.count("ValueError: no such thing") >= fault.count, seen.output
    elif fault.kind == "wrong program":
        assert seen.code == 1, seen.output
        assert "The processes differ at call" in seen.output, seen.output
        assert "of 'other_step' (survival_program.py" in seen.output, seen.output
    else:
        assert seen.code == 0, seen.output
        require_same_numbers(seen, calm)
    assert "F1" not in [line[4:6] for line in seen.output.splitlines()]  # aborts of C++
