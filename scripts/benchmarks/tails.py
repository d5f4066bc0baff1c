"""Partial batches: the program that all of them share, against that of full ones.

Padding is masked in it, and the plain loss that its function computes has no mask. What it costs is
paid only by the last batch of an epoch, like the traces for other numbers of rows. Run as a script,
with a number of devices, it prints figures of that many emulated ones.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist
from benchmarks import one_batch, pairs
from benchmarks.figures import Figure, at_most_times, equal_within
from tpudist.xla.hlo import compiled_program

SUITE = "partial batches"
FLOPS_TOLERANCE, MOST_BYTES, MOST_TRACE, MOST_GROWTH = 0.01, 1.05, 2.0, 1.5
NUM_TRACES = 5
DEVICES = (8, 64)


@dataclass(frozen=True)
class Case:
    """A task, and how many rows of each replica are real in its tail."""

    task: pairs.Task
    lost: int = 3


def cases() -> dict[str, Case]:
    """An MLP, a convnet of real size and the reference transformer."""
    return {
        "MLP": Case(pairs.mlp()),
        "ResNet-18": Case(resnet()),
        "transformer": Case(pairs.transformer()),
    }


def figures(devices: Sequence[jax.Device] | None, where: str) -> Iterator[Figure]:
    """Work and traffic of the masked program of each case, and the time to build both programs."""
    for model, case in cases().items():
        name = f"{model}, {where}"
        strategy = tpudist.TPUStrategy(devices=devices)
        full, tail = _rows(case, strategy)
        plain, seconds = _compile(case.task, strategy, full)
        masked, more_seconds = _compile(case.task, strategy, tail)
        flops = Figure(SUITE, name, "FLOPs", masked.flops, plain.flops)
        yield equal_within(flops, FLOPS_TOLERANCE)
        moved = Figure(SUITE, name, "bytes", masked.bytes_accessed, plain.bytes_accessed)
        yield at_most_times(moved, MOST_BYTES)
        yield Figure(SUITE, name, "temporary bytes", masked.temp_bytes, plain.temp_bytes)
        yield Figure(SUITE, name, "seconds to compile", more_seconds, seconds)
        traces = Figure(SUITE, name, "CPU seconds to trace", *_trace_in_turns(case, strategy))
        yield at_most_times(traces, MOST_TRACE)


def growth() -> Iterator[Figure]:
    """Traces and placements of a partial batch with more devices, 8 rows for each."""
    few, many = ({x["subject"]: x for x in _measure_in_process(n)} for n in DEVICES)
    for subject, figure in many.items():
        if subject in few:
            quantity = f"{figure['quantity']}: {DEVICES[1]} devices, against {DEVICES[0]}"
            grown = Figure(SUITE, subject, quantity, figure["ours"], few[subject]["ours"])
            yield at_most_times(grown, MOST_GROWTH)
    for x in (*few.values(), *many.values()):
        yield Figure(**{k: v for k, v in x.items() if k != "ratio"})


def _measure_in_process(num_devices: int) -> list[dict]:
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    ended = subprocess.run(
        [sys.executable, __file__, str(num_devices)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    if ended.returncode:
        raise RuntimeError(
            f"The process with {num_devices} devices ended with exit code {ended.returncode}:\n"
            f"{ended.stderr[-4000:]}"
        )
    return json.loads(ended.stdout.splitlines()[-1])


def _main(num_devices: int) -> None:
    tpudist.emulate(num_devices)
    strategy = tpudist.TPUStrategy()
    found = []
    for name in ("MLP", "transformer"):
        task = dataclasses.replace(cases()[name].task, batch_size=8 * num_devices)
        traces = _trace_in_turns(Case(task), strategy)
        found.append(
            Figure(SUITE, f"{name}, 8 rows for each device", "CPU seconds to trace", *traces)
        )
    found += one_batch.figures(strategy, SUITE)
    print(json.dumps([figure.as_json() for figure in found]))


def _rows(case: Case, strategy: tpudist.Strategy) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the rows of each replica in a full batch, and in the partial one."""
    n = strategy.num_replicas_in_sync
    each = case.task.batch_size // n
    return (each,) * n, (*(each,) * (n - 1), each - case.lost)


def _trace_in_turns(case: Case, strategy: tpudist.Strategy) -> tuple[float, float]:
    """Returns the CPU seconds to trace and lower new steps, for partial and for full batches."""
    full, tail = _rows(case, strategy)
    times: dict[tuple[int, ...], list[float]] = {tail: [], full: []}
    for _ in range(NUM_TRACES):
        for rows, own in times.items():
            own.append(_lower(case.task, strategy, rows)[1])
    masked, plain = map(statistics.median, times.values())
    return masked, plain


def _compile(
    task: pairs.Task, strategy: tpudist.Strategy, rows: tuple[int, ...]
) -> tuple[compiled_program.ProgramFigures, float]:
    lowered, _ = _lower(task, strategy, rows)
    start = time.perf_counter()
    compiled = lowered.compile()
    return compiled_program.program_figures(compiled), time.perf_counter() - start


def _lower(
    task: pairs.Task, strategy: tpudist.Strategy, rows: tuple[int, ...]
) -> tuple[jax.stages.Lowered, float]:
    """Returns a new step, lowered for such a batch, and the CPU seconds that this takes."""
    model = strategy.create_abstract(task.make_model)
    tx = optax.adamw(pairs.LEARNING_RATE)
    optimizer = strategy.create_abstract(lambda model: tpudist.Optimizer(tx, model), model)

    def step(model, optimizer, batch):
        def loss_of(model):
            return tpudist.compute_average_loss(
                task.loss(model, batch), global_batch_size=task.batch_size
            )

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    whole = pairs.batch_of_replicas(task, strategy)
    batch = tpudist.PerReplica(whole.array, rows)
    gc.collect()
    start = time.process_time()
    lowered = strategy.lower(step, args=(model, optimizer, batch))
    return lowered, time.process_time() - start


class Block(nnx.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int, out: int, stride: int, rngs: nnx.Rngs):
        """Gives `out` channels of maps that are smaller by `stride`."""
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        self.first = conv(channels, out, (3, 3), strides=stride)
        self.second = conv(out, out, (3, 3))
        self.norms = nnx.List([nnx.BatchNorm(out, rngs=rngs) for _ in range(2)])
        self.around = conv(channels, out, (1, 1), strides=stride) if stride > 1 else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits of images `[batch, height, width, channels]`."""
        y = nnx.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        return nnx.relu(y + (x if self.around is None else self.around(x)))


class ResNet(nnx.Module):
    """A residual network with the shapes of ResNet-18."""

    def __init__(self, rngs: nnx.Rngs):
        """Creates the layers, with parameters drawn by `rngs`."""
        self.stem = nnx.Conv(3, 64, (7, 7), strides=2, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = [[Block(a, b, s, rngs), Block(b, b, 1, rngs)] for a, b, s in sizes]
        self.blocks = nnx.List([block for stage in blocks for block in stage])
        self.head = nnx.Linear(512, 1000, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits `[batch, 1000]` of images `[batch, 224, 224, 3]`."""
        x = nnx.relu(self.norm(self.stem(images)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


def resnet() -> pairs.Task:
    """ResNet-18 on images of 224 x 224, with batch statistics of each replica."""
    return pairs.Task(
        lambda: ResNet(nnx.Rngs(0)),
        lambda model, images: optax.softmax_cross_entropy_with_integer_labels(
            model(images), jnp.zeros(len(images), jnp.int32)
        ),
        jax.ShapeDtypeStruct((224, 224, 3), np.float32),
    )


if __name__ == "__main__":
    _main(int(sys.argv[1]))
