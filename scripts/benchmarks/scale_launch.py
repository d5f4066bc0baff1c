"""Growth of what `tpudist launch` and the rendezvous add to the start of processes on one machine.

Stubs are processes that do what the launcher and the rendezvous demand, and do not import JAX. So
the CPU time of the launcher, and of process 0 at the rendezvous, is visible for many processes. The
floor of a real start is the import of JAX and tpudist, which two launched processes show.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, at_most, at_most_times

SUITE = "start of processes"
COUNTS = (2, 16, 64)
TARGET_MS = 5.0
"""Most CPU time that the launcher, or process 0 at the rendezvous, spends on one more process."""
TARGET_STEP = 1.5
"""Most CPU time of a process until its first step, as a multiple of the imports."""

# Runs the command in this process, and prints the time of this process, without its children.
_LAUNCHER = """
import resource, sys, time
from tpudist import cli
cli.main(["launch", *sys.argv[1:]])
used = resource.getrusage(resource.RUSAGE_SELF)
print("launcher", used.ru_utime + used.ru_stime)
"""
# The version of JAX is part of an introduction. Process 0 listens again as JAX's service would.
_STUB = """
import json, os, socket, sys, time, types
sys.modules["jax"] = types.ModuleType("jax")
sys.modules["jax"].__version__ = "stub"
from tpudist.processes import rendezvous
task = json.loads(os.environ["TF_CONFIG"])
addresses, index = task["cluster"]["worker"], task["task"]["index"]
start = time.process_time()
rendezvous.join(addresses[0], len(addresses), index)
if not index:
    print("rendezvous", time.process_time() - start)
    host, port = addresses[0].rsplit(":", 1)
    with socket.create_server((host, int(port)), backlog=1024) as service:
        for _ in addresses[1:]:
            service.accept()[0].close()
"""
_FIRST_STEP = """
import time
import flax.nnx, jax, optax
import tpudist
import tpudist.strategies.multi_worker
imports = time.process_time()
strategy = tpudist.MultiWorkerMirroredStrategy()
with strategy.scope():
    v = tpudist.Variable(0.0)

@tpudist.function
def train():
    strategy.run(lambda: v.assign_add(1.0))

train()
v.read_value().block_until_ready()
print("step", imports, time.process_time())
"""


def figures() -> Iterator[Figure]:
    """CPU time of the launcher and of process 0, and of a process until its first step."""
    found = {count: _launch(_STUB, count) for count in COUNTS}
    for what in ("launcher", "rendezvous"):
        fewest = COUNTS[0]
        for count in COUNTS:
            ours_ms, fewest_ms = (1e3 * found[n][what][0] for n in (count, fewest))
            figure = Figure(SUITE, f"{count} stubs", f"CPU of the {what}, ms", ours_ms, fewest_ms)
            yield figure
        each_ms = 1e3 * (found[COUNTS[-1]][what][0] - found[fewest][what][0])
        each_ms /= COUNTS[-1] - fewest
        subject = f"{fewest} to {COUNTS[-1]} stubs"
        quantity = f"CPU of the {what} for one more, ms"
        yield at_most(Figure(SUITE, subject, quantity, each_ms, None), TARGET_MS)
    imports_s, step_s = _launch(_FIRST_STEP, 2)["step"]
    quantity = "CPU until the first step, s (baseline: imports)"
    yield at_most_times(Figure(SUITE, "2 processes", quantity, step_s, imports_s), TARGET_STEP)


def _launch(program: str, count: int) -> dict[str, list[float]]:
    """Returns the numbers of each line that the launcher or one of its processes printed."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text(program)
        options = ["-n", str(count), "--devices-per-process", "1", str(script)]
        command = [sys.executable, "-c", _LAUNCHER, *options]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = (line.split("] ")[-1].split() for line in found.stdout.splitlines())
    return {
        words[0]: [float(x) for x in words[1:]]
        for words in lines
        if words and words[0] in ("launcher", "rendezvous", "step")
    }
