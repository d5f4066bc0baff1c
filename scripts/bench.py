"""Measures tpudist against hand-written JAX: python scripts/bench.py --help

Every figure has its baseline in the same run, on the same machine. A figure that misses the
project's target is marked, and the exit code stays 0, because a timing is not a test.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import tyro
from rich.console import Console

import tpudist
from benchmarks import (
    calls,
    checkpoint,
    comparison,
    create,
    determinism,
    emulation,
    examples,
    first_step,
    imports,
    input,
    keras_loop,
    keras_steps,
    processes,
    programs,
    published,
    ranking,
    scale,
    servers,
    tables,
    tails,
    training_loop,
    weights,
)
from benchmarks.figures import Figure, show
from tpudist.xla import topology

NUM_DEVICES = 8
SLICES = ("v5e:4x4", "v6e:2x4")
TAILS_SLICE = "v5e:2x4"
CHECKPOINT_REPEATS = 3
Suite = Literal[
    "calls",
    "create",
    "first_step",
    "programs",
    "tails",
    "tpu",
    "emulation",
    "checkpoint",
    "input",
    "published",
    "ranking",
    "scale",
    "examples",
    "determinism",
    "processes",
    "tables",
    "servers",
    "imports",
    "weights",
    "train",
    "comparison",
    "keras",
]


@dataclass(frozen=True)
class Config:
    """Measures tpudist against hand-written JAX, on 8 emulated devices."""

    suites: tuple[Suite, ...] = ("calls", "programs", "emulation")
    """Suites to measure: Python time per call; the creation of a model; the first step of a large
    model; the compiled programs; the programs of partial batches; the programs that the TPU
    compiler creates for v5e:4x4 and v6e:2x4, and those of partial batches for v5e:2x4 (needs
    libtpu, takes minutes); loops that never wait;
    checkpoints; the distributed iterator; the planner's estimates against published training runs,
    its estimates without the compiler against its plans (half an hour), and its
    own time from 8 to 4096 chips; the steps of the programs in examples/; the
    cost of `deterministic=8`; steps in two processes, by hand, watched, and with a state that is
    kept for survivors; rows of an embedding table by id; steps of parameter servers, against
    TensorFlow's and a hand-written loop on Ray; the cost of importing; the time and memory to read
    pretrained weights, against Orbax; the training loop around a step; a partial batch and a step
    by tpudist, JAX, Keras, Accelerate and Fabric; steps of Keras' `fit` in a scope, against
    keras.distribution.DataParallel, and custom loops over Keras models, against hand-written
    ones."""
    published: tuple[str, ...] = ()
    """Names of the published runs to plan (default: all)."""
    calls: int = 600
    """Number of timings of each variant of a call."""
    create_repeats: int = 5
    """Number of times that the create suite creates each model in each way."""
    first_step_repeats: int = 3
    """Number of processes that the first_step suite starts for each program."""
    small_steps: int = 20_000
    """Length of the emulation suite's loop of small steps."""
    transformer_steps: int = 300
    """Length of the emulation suite's loop of transformer steps."""
    devices: tuple[int, ...] = (8, 16)
    """Numbers of devices of the emulation suite."""
    example_steps: int = 100
    """Number of timings of each step in the suites examples, determinism and processes."""
    import_repeats: int = 15
    """Number of processes that the imports suite starts for each program."""
    train_steps: int = 1000
    """Length of the loops of the train suite."""
    table_rows: int = 4_000_000
    """Number of rows of 256 bytes in each of the two tables of the tables suite."""
    checkpoint_megabytes: int = 500
    """Size of the state that the checkpoint suite saves and restores."""
    weights_layers: int = 2
    """Number of layers of Llama-3.1-8B's size that the weights suite reads and times."""
    tensorflow_python: Path | None = None
    """A Python that has TensorFlow, for the suites input (default: this one, if it has TensorFlow)
    and servers (default: no comparison with TensorFlow)."""
    torch_python: Path | None = None
    """A Python that has PyTorch, Accelerate and Lightning Fabric, for the suite comparison
    (default: no comparison with the last two)."""
    out: Path | None = None
    """File to which all figures are written as JSON."""


def main(args: list[str] | None = None) -> int:
    """Runs the chosen suites."""
    config = tyro.cli(Config, args=args)
    tpudist.emulate(NUM_DEVICES)
    console = Console()
    found: list[Figure] = []
    for suite in config.suites:
        start = time.perf_counter()
        figures = list(MEASURE[suite](config))
        seconds = time.perf_counter() - start
        show(console, f"{figures[0].suite} ({suite}, {seconds:.0f} s)", figures)
        found += figures
    with_target = [figure for figure in found if figure.met is not None]
    missed = [figure for figure in with_target if not figure.met]
    if with_target:
        console.print(f"{len(with_target) - len(missed)} of {len(with_target)} targets met.")
    for figure in missed:
        console.print(f"Missed: {figure.subject}, {figure.quantity}: {figure.target}.")
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(json.dumps(report(found), indent=1) + "\n")
        console.print(f"Written to {config.out}.")
    return 0


def on_slices(config: Config) -> list[Figure]:
    """The figures of the suite tpu."""
    whole = [figure for name in SLICES for figure in programs.figures_on_slice(name)]
    return [*whole, *tails.figures(topology.devices(TAILS_SLICE), TAILS_SLICE)]


def emulated(config: Config) -> list[Figure]:
    """The figures of the suite emulation."""
    return [
        figure
        for num_devices in config.devices
        for figure in emulation.figures(num_devices, config.small_steps, config.transformer_steps)
    ]


MEASURE: dict[Suite, Callable[[Config], Iterable[Figure]]] = {
    "calls": lambda config: calls.figures(config.calls),
    "create": lambda config: create.figures(config.create_repeats),
    "first_step": lambda config: first_step.figures(config.first_step_repeats),
    "programs": lambda config: programs.figures(None, f"{NUM_DEVICES} CPU devices"),
    "tails": lambda config: [
        *tails.figures(None, f"{NUM_DEVICES} CPU devices"),
        *tails.growth(),
    ],
    "tpu": on_slices,
    "emulation": emulated,
    "checkpoint": lambda config: checkpoint.figures(
        config.checkpoint_megabytes, CHECKPOINT_REPEATS
    ),
    "input": lambda config: input.figures(config.tensorflow_python),
    "published": lambda config: published.figures(config.published),
    "ranking": lambda config: ranking.figures(),
    "scale": lambda config: scale.figures(),
    "examples": lambda config: examples.figures(config.example_steps),
    "determinism": lambda config: determinism.figures(config.example_steps),
    "processes": lambda config: processes.figures(config.example_steps),
    "tables": lambda config: tables.figures(config.table_rows),
    "servers": lambda config: servers.figures(config.tensorflow_python),
    "imports": lambda config: imports.figures(config.import_repeats),
    "weights": lambda config: weights.figures(config.weights_layers),
    "train": lambda config: training_loop.figures(config.train_steps),
    "comparison": lambda config: comparison.figures(config.torch_python),
    "keras": lambda config: [*keras_loop.figures(), *keras_steps.figures()],
}
"""Function that measures each suite."""


def report(figures: Iterable[Figure]) -> dict:
    """Returns the figures, and the versions and the machine that they were measured with."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "libtpu")
    installed = [name for name in packages if importlib.util.find_spec(name)]
    return {
        "versions": {"tpudist": tpudist.__version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in installed},
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "num_cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "devices": [str(device) for device in jax.devices()],
        },
        "figures": [figure.as_json() for figure in figures],
    }


if __name__ == "__main__":
    raise SystemExit(main())
