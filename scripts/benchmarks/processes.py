"""What it costs that processes are watched, and that a run survives: steps in two processes.

The baseline is the same step written by hand, in the same processes and in turn with ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import Figure

SUITE = "processes"
COUNT, DEVICES = 2, 2
TARGET = 1.05


def figures(num_rounds: int, timeout_s: float = 600) -> list[Figure]:
    """Microseconds per step."""
    folder = Path(__file__).parents[1]
    program = Path(__file__).with_name("process_steps.py")
    options = ("-n", COUNT, "--devices-per-process", DEVICES)
    command = [sys.executable, "-m", "tpudist", "launch", *options, program, num_rounds]
    ended = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, folder.parent)))},
    )
    line = next((x for x in ended.stdout.splitlines() if x.startswith("[0] {")), None)
    if ended.returncode or line is None:
        raise RuntimeError(
            f"The steps in {COUNT} processes ended with exit code {ended.returncode}:\n"
            f"{(ended.stdout + ended.stderr)[-4000:]}"
        )
    found = json.loads(line.partition(" ")[2])
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
    return [watched, *commits]
