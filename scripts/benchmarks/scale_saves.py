"""Growth of a save with the number of processes: bytes read back, and CPU seconds of each."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, at_most, at_most_times

SUITE = "saves by more processes"
NUM_PROCESSES = (1, 2, 4)
MEGABYTES = 256
_DEVICES = 4  # of all processes together
_TIMEOUT_S = 300
_LARGEST_SHARE = 1.05
_LARGEST_EXPONENT = -0.9


def figures() -> Iterator[Figure]:
    """The state is the same for each number of processes, and is split between them."""
    read: list[float] = []
    for num_processes in NUM_PROCESSES:
        found = _launch(num_processes)
        subject = f"{MEGABYTES} MiB, {num_processes} process{'es' * (num_processes > 1)}"
        first = next(x for x in found if x["process"] == 0)
        read.append(first["bytes"] / 2**20)
        # The baseline is the share of a process: it must be read to be summed.
        share = MEGABYTES / num_processes
        most = max(x["bytes"] for x in found)
        for who, size in (("process 0", first["bytes"]), ("any process, at most", most)):
            figure = Figure(SUITE, subject, f"MiB read by {who}", size / 2**20, share)
            yield at_most_times(figure, _LARGEST_SHARE)
        yield Figure(SUITE, subject, "CPU s of process 0", first["cpu_s"], None)
        most = max(x["cpu_s"] for x in found)
        yield Figure(SUITE, subject, "CPU s of any process, at most", most, None)
    exponent = math.log(read[-1] / read[0]) / math.log(NUM_PROCESSES[-1] / NUM_PROCESSES[0])
    subject = f"{MEGABYTES} MiB, {NUM_PROCESSES[0]} to {NUM_PROCESSES[-1]} processes"
    quantity = "exponent of the bytes read by process 0"
    yield at_most(Figure(SUITE, subject, quantity, exponent, None), _LARGEST_EXPONENT)


def _launch(num_processes: int) -> list[dict[str, float]]:
    """Returns the figures that each process prints."""
    folder = Path(__file__).parents[1]
    file = Path(__file__).with_name("saved_shards.py")
    options = ("-n", num_processes, "--devices-per-process", _DEVICES // num_processes)
    path = os.environ.get("PYTHONPATH", "")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(x for x in (path, *map(str, (folder, folder.parent))) if x),
        "TPUDIST_NUM": str(num_processes),
    }
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "tpudist", "launch", *options, file, place, MEGABYTES]
        ended = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=_TIMEOUT_S, env=env
        )
    lines = (line[line.find("{") :] for line in ended.stdout.splitlines() if '"cpu_s"' in line)
    found = [json.loads(line) for line in lines]
    if ended.returncode or len(found) != num_processes:
        raise RuntimeError(
            f"{file.name} in {num_processes} processes ended with exit code {ended.returncode}:\n"
            f"{(ended.stdout + ended.stderr)[-4000:]}"
        )
    return found
