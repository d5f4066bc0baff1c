"""The cost of watching processes and of surviving their loss: steps in two processes.

The baseline is the same step written by hand, in the same processes and in turn with ours.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure

SUITE = "processes"
COUNT, DEVICES = 2, 2
TARGET = 1.05
NUM_STARTS, START_S = 5, 0.1


def figures(num_rounds: int, timeout_s: float = 600) -> list[Figure]:
    """Microseconds per step, and seconds to connect."""
    found = _launch("process_steps.py", str(num_rounds), timeout_s)[0]
    hand = found["by hand"]
    subject = f"MLP, {COUNT} processes of {DEVICES} devices"
    watched = Figure(
        SUITE,
        subject,
        "us per step, watched",
        found["run"],
        hand,
        f"at most {TARGET} x",
        found["run"] <= TARGET * hand,
        details=found,
    )
    commits = [
        Figure(SUITE, subject, f"us per step, {name}", found[name], hand)
        for name in found
        if name.startswith("commit")
    ]
    return [watched, *commits, _start(timeout_s)]


def _start(timeout_s: float) -> Figure:
    """Median of several starts: seconds until the last process is connected."""
    times: dict[str, list[float]] = {"by hand": [], "strategy": []}
    for _ in range(NUM_STARTS):
        for way, found in times.items():
            ended = _launch("process_start.py", way, timeout_s)
            found.append(min(x["seconds"] for x in ended))
    ours, hand = (statistics.median(times[way]) for way in ("strategy", "by hand"))
    return Figure(
        SUITE,
        f"{COUNT} processes of {DEVICES} devices",
        "s to connect",
        ours,
        hand,
        f"at most {START_S} s more",
        ours <= hand + START_S,
        by_difference=True,
        details=times,
    )


def _launch(program: str, argument: str, timeout_s: float) -> list[dict[str, Any]]:
    """Returns the JSON that each process of a program prints."""
    folder = Path(__file__).parents[1]
    options = ("-n", COUNT, "--devices-per-process", DEVICES)
    file = Path(__file__).with_name(program)
    command = [sys.executable, "-m", "tpudist", "launch", *options, file, argument]
    ended = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, folder.parent)))},
    )
    lines = [x.partition(" ")[2] for x in ended.stdout.splitlines()]
    found = [json.loads(x) for x in lines if x.startswith("{")]
    if ended.returncode or not found:
        raise RuntimeError(
            f"{program} in {COUNT} processes ended with exit code {ended.returncode}:\n"
            f"{(ended.stdout + ended.stderr)[-4000:]}"
        )
    return found
