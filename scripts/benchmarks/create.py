"""CPU time to create a model and its optimizer: `strategy.create` against Flax without `jit`.

The baseline creates the whole state on one device and then copies it to all. Both start without
compiled programs. They take turns, and a figure is the median.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable

import jax
from flax import nnx

import tpudist
from benchmarks.figures import Figure, at_most_times
from benchmarks.first_step import ADAM, DEPTHS, Model

SUITE = "creation"
TARGET = 1.2


def figures(repeats: int) -> list[Figure]:
    """The figures for each depth, on mirrored and on split state."""
    strategies = {
        "mirrored": tpudist.MirroredStrategy(),
        "split by fsdp=4": tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
    }
    found = []
    for depth in DEPTHS:
        for name, strategy in strategies.items():
            ours = functools.partial(create, strategy, depth)
            # The baseline gets the placement for nothing, from a creation that is not timed.
            shardings = [x.sharding for x in ours()]
            times = measure([ours, functools.partial(create_by_flax, depth, shardings)], repeats)
            figure = Figure(
                SUITE, f"{depth} layers, {name}", "s of CPU", *map(statistics.median, times),
                details={"ours": times[0], "baseline": times[1]},
            )  # fmt: skip
            found.append(at_most_times(figure, TARGET))
    return found


def create(strategy: tpudist.Strategy, depth: int) -> list[jax.Array]:
    """Returns the arrays of a model and its optimizer, created on all devices."""
    model = strategy.create(lambda: Model(depth))
    optimizer = strategy.create(lambda: nnx.Optimizer(model, ADAM, wrt=nnx.Param))
    return jax.block_until_ready(jax.tree.leaves(nnx.state((model, optimizer))))


def create_by_flax(depth: int, shardings: list[jax.sharding.Sharding]) -> list[jax.Array]:
    """Returns the same arrays, created on one device and moved to all."""
    model = Model(depth)
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    state = jax.tree.leaves(nnx.state((model, optimizer)))
    return jax.block_until_ready(jax.device_put(state, shardings))


def measure(variants: list[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Returns the seconds of CPU time of all threads, of each call of each variant."""
    times: list[list[float]] = [[] for _ in variants]
    for _ in range(repeats):
        for variant, own in zip(variants, times, strict=True):
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            variant()
            own.append(time.process_time() - start)
    return times
