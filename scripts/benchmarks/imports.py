"""The cost of `import tpudist` in addition to JAX, Flax and Optax, and of all public names.

Fresh processes, one of each in turn, all of them once before: so files are in memory and compiled.
"""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.figures import Figure, at_most_times

AT_MOST = 1.05
_JAX = "import jax, flax, optax"
_NNX = f"{_JAX}; from flax import nnx"
# Each with what it is measured against.
PROGRAMS = {
    "import tpudist, after those three": (f"{_JAX}, tpudist", _JAX),
    "import tpudist on its own": ("import tpudist", _JAX),
    "all public names, after those three and nnx": (
        f"{_NNX}; import tpudist; [getattr(tpudist, x) for x in tpudist.__all__]",
        _NNX,
    ),
}


def figures(repeats: int) -> Iterator[Figure]:
    """Medians of the time on the clock and of the CPU, of `repeats` processes of each program."""
    programs = dict.fromkeys(itertools.chain(*PROGRAMS.values()))
    found: dict[str, list[tuple[float, float]]] = {program: [] for program in programs}
    for i in range(-1, repeats):
        for program in programs if i % 2 else reversed(programs):
            taken = _seconds(program)
            if i >= 0:
                found[program].append(taken)
    for subject, (ours, baseline) in PROGRAMS.items():
        for column, quantity in enumerate(("seconds", "seconds of CPU")):
            of_ours, of_baseline = (
                statistics.median(x[column] for x in found[y]) for y in (ours, baseline)
            )
            figure = Figure("Imports", subject, quantity, of_ours, of_baseline)
            is_promised = subject != "all public names, after those three and nnx"
            yield at_most_times(figure, AT_MOST) if is_promised else figure


def _seconds(program: str) -> tuple[float, float]:
    """Returns the elapsed seconds and the seconds of CPU of a program."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu
