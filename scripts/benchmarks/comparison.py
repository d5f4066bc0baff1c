"""The same training by several libraries, on 8 replicas: docs/comparison.md shows the results.

Each library trains in processes of its own (`uneven_epochs.py`): what a last batch of 36 rows does
to the weights, in how many lines, and for those of JAX how long a step takes with its input.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import uneven_epochs
from benchmarks.figures import Figure

SUITE = "Comparison"
PROGRAM = Path(uneven_epochs.__file__)
OF_JAX = ("tpudist", "jax", "keras")
OF_TORCH = ("accelerate", "fabric")
PACKAGES = {
    "jax": "jax",
    "keras": "keras",
    "accelerate": "accelerate",
    "fabric": "lightning_fabric",
}
REPEATS = 3


def figures(torch_python: Path | None) -> Iterator[Figure]:
    """Compares the results on a partial batch, the lines of code and the time of a step.

    Args:
        torch_python: A Python that has PyTorch, Accelerate and Lightning Fabric; without it those
            two are left out, as is Keras where it is not installed.
    """
    python = {name: Path(sys.executable) for name in OF_JAX}
    python |= dict.fromkeys(OF_TORCH, torch_python) if torch_python else {}
    right = uneven_epochs.weights_of_one_device()
    for name, command in python.items():
        if name in PACKAGES and not _has(command, PACKAGES[name]):
            continue
        found = ask(command, name)
        if "refused" in found:
            yield Figure(SUITE, name, "refuses the partial batch", 1, None, details=found)
        else:
            apart = float(abs(right - found["weights"]).max())
            yield Figure(SUITE, name, "weights apart from one device's, 1e-6", apart * 1e6, None)
        train = uneven_epochs.LIBRARIES[name]
        yield Figure(SUITE, name, "lines", lines_of(train), lines_of(uneven_epochs.train_with_jax))
    yield from _steps([name for name in python if name in OF_JAX and _has(python[name], name)])


def lines_of(function: Any) -> int:
    """Lines of its body that say something, without imports."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    body = [x for x in tree.body if not isinstance(x, ast.Import | ast.ImportFrom)]
    return len("\n".join(map(ast.unparse, body)).replace("\n\n", "\n").splitlines())


def _steps(names: list[str]) -> Iterator[Figure]:
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(REPEATS):
        for name in names:
            found = ask(Path(sys.executable), name, "--steps")
            taken[name].append(1000 * found["seconds_per_step"])
    median = {name: statistics.median(values) for name, values in taken.items()}
    for name, each in median.items():
        quantity = "ms of CPU per step of 512 x 1024, input included"
        yield Figure(SUITE, name, quantity, each, median["jax"])


def _has(python: Path, package: str) -> bool:
    program = f"import importlib.util as u; print(u.find_spec({package!r}) is not None)"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def ask(python: Path, library: str, *options: str) -> dict[str, Any]:
    """Returns the first line that a process prints; if there are several, all print the same."""
    replicas = str(uneven_epochs.NUM_REPLICAS)
    start = ["-m", "torch.distributed.run", "--nproc-per-node", replicas]
    command = [python, *(start if library == "accelerate" else []), PROGRAM, library, *options]
    # Of JAX: the processes have devices of their own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{library} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found, _ = json.JSONDecoder().raw_decode(lines[0])  # several may share a line
    return found
