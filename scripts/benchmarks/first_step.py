"""CPU time of the first step of an unrolled transformer, against `nnx.jit` with shardings.

Each figure is the median over fresh processes, which take turns and use no cache of compiled
programs. A process creates the model and its optimizer first, and then measures one step: trace,
lowering, XLA and the run, in seconds of CPU time of all threads.

`python -m benchmarks.first_step tpudist 8` is such a process; it prints its seconds as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import tpudist
from benchmarks.figures import Figure, at_most_times

SUITE = "first step"
DEPTHS = (8, 24, 48)
TARGET = 1.1
NUM_DEVICES = 8
DIM, NUM_HEADS, NUM_TOKENS, LENGTH, BATCH_SIZE = 128, 4, 256, 64, 16
ADAM = optax.adamw(1e-3)
VARIANTS = ("tpudist", "nnx.jit")


class Block(nnx.Module):
    """A block of a transformer, with dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(DIM, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            NUM_HEADS, DIM, decode=False, deterministic=True, rngs=rngs
        )
        self.wide = nnx.Linear(DIM, 4 * DIM, rngs=rngs)
        self.narrow = nnx.Linear(4 * DIM, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the activations after the block."""
        x = x + self.attention(self.norms[0](x))
        return x + self.dropout(self.narrow(nnx.gelu(self.wide(self.norms[1](x)))))


class Model(nnx.Module):
    """A transformer whose layers are written out."""

    def __init__(self, depth: int):
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Embed(NUM_TOKENS, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
        self.logits = nnx.Linear(DIM, NUM_TOKENS, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits of the next tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


def figures(repeats: int) -> Iterator[Figure]:
    """The figures for each depth, and for each further layer."""
    times: dict[tuple[int, str], list[float]] = {}
    phases: dict[int, dict[str, float]] = {}
    for i in range(repeats):
        for depth in DEPTHS:
            for variant in VARIANTS if i % 2 else reversed(VARIANTS):
                measured = _measure_in_child(variant, depth)
                times.setdefault((depth, variant), []).append(measured["seconds"])
                phases[depth] = measured["phases"] or phases.get(depth, {})
    medians = {key: statistics.median(found) for key, found in times.items()}
    for depth in DEPTHS:
        ours, baseline = (medians[depth, variant] for variant in VARIANTS)
        details = {"wall seconds of the phases": phases[depth]} | {
            variant: times[depth, variant] for variant in VARIANTS
        }
        figure = Figure(SUITE, f"{depth} layers", "s of CPU", ours, baseline, details=details)
        yield at_most_times(figure, TARGET)
    first, last = DEPTHS[0], DEPTHS[-1]
    growth = ((medians[last, x] - medians[first, x]) / (last - first) for x in VARIANTS)
    figure = Figure(SUITE, f"growth from {first} to {last} layers", "s of CPU per layer", *growth)
    yield at_most_times(figure, TARGET)
    load, _, _ = os.getloadavg()
    yield Figure(SUITE, "machine", f"load average, {os.cpu_count()} cores", load, None)


def _measure_in_child(variant: str, depth: int) -> dict:
    program = [sys.executable, "-m", "benchmarks.first_step", variant, str(depth)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    folder = Path(__file__).parent.parent
    child = subprocess.run(
        program, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(child.stdout.splitlines()[-1])


def prepare_ours(depth: int, tokens: np.ndarray) -> Callable[[], jax.Array]:
    """Returns a function that makes a step of `strategy.run`."""
    strategy = tpudist.MirroredStrategy()
    model = strategy.create(lambda: Model(depth))
    optimizer = strategy.create(lambda: tpudist.Optimizer(ADAM, model))

    def step(model: Model, optimizer: tpudist.Optimizer, batch: jax.Array) -> jax.Array:
        def loss_of(model: Model) -> jax.Array:
            return tpudist.compute_average_loss(_loss(model, batch).mean(-1))

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    [batch] = strategy.experimental_distribute_dataset([tokens])
    return lambda: strategy.run(step, args=(model, optimizer, batch))


def prepare_baseline(depth: int, tokens: np.ndarray) -> Callable[[], jax.Array]:
    """Returns a function that makes a step of `nnx.jit`, whose shardings XLA propagates."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("replica",), axis_types=(AxisType.Auto,))
    jax.set_mesh(mesh)
    model = Model(depth)
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    state = jax.device_put(nnx.state((model, optimizer)), NamedSharding(mesh, P()))
    nnx.update((model, optimizer), state)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: _loss(model, batch).mean())(model)
        optimizer.update(model, gradients)
        return loss

    batch = jax.device_put(tokens, NamedSharding(mesh, P("replica")))
    return lambda: step(model, optimizer, batch)


def _loss(model: Model, batch: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(model(batch[:, :-1]), batch[:, 1:])


def main(variant: str, depth: int) -> None:
    """Measures one first step in this process, and prints it as JSON."""
    tpudist.emulate(NUM_DEVICES)
    tokens = np.random.default_rng(0).integers(0, NUM_TOKENS, (BATCH_SIZE, LENGTH + 1))
    prepare = prepare_ours if variant == "tpudist" else prepare_baseline
    step = prepare(depth, tokens.astype(np.int32))
    start = time.process_time()
    jax.block_until_ready(jax.tree.leaves(step()))
    seconds = time.process_time() - start
    phases = dict(tpudist.compile_log()[-1].phases) if variant == "tpudist" else None
    print(json.dumps({"seconds": seconds, "phases": phases}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
