"""Emulation keeps up: loops that never wait for a result, on 8 and on 16 virtual devices.

Steps that are dispatched ahead fill the devices' queues; with hundreds in them each step used to
take ten times as long, or XLA aborted the process. Each number of devices has its own process,
which is this file run as a script: a process chooses its devices once.

The baseline of a step's time is the same loop written by hand, which waits for every step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import tpudist
from benchmarks import pairs
from benchmarks.figures import Figure, at_most_times
from tpudist.models import TransformerConfig
from tpudist.training.steps import make_train_step

SUITE = "emulation"
MAX_SLOWDOWN = 2.0  # of the last tenth against the first; the machine is not ours alone


@dataclass(frozen=True)
class Loop:
    """Returns the milliseconds per step of a loop."""

    num_steps: int
    first_tenth_ms: float
    last_tenth_ms: float
    waiting_by_hand_ms: float


def figures(num_devices: int, num_small_steps: int, num_transformer_steps: int) -> list[Figure]:
    """The figures of both loops in a process with `num_devices` devices."""
    found = []
    for name, loop in run(num_devices, num_small_steps, num_transformer_steps).items():
        subject = f"{loop.num_steps:,} {name} steps, {num_devices} devices"
        slowdown = Figure(
            SUITE,
            subject,
            "ms per step: end, start",
            loop.last_tenth_ms,
            loop.first_tenth_ms,
        )
        found.append(at_most_times(slowdown, MAX_SLOWDOWN))
        found.append(
            Figure(
                SUITE,
                subject,
                "ms per step: end, by hand",
                loop.last_tenth_ms,
                loop.waiting_by_hand_ms,
            )
        )
    return found


def run(
    num_devices: int, num_small_steps: int, num_transformer_steps: int, timeout_s: float = 900
) -> dict[str, Loop]:
    """Runs both loops in a process of their own; raises if it fails or does not end."""
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    ended = subprocess.run(
        [
            sys.executable,
            __file__,
            *map(str, (num_devices, num_small_steps, num_transformer_steps)),
        ],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    if ended.returncode:
        raise RuntimeError(
            f"The loops on {num_devices} devices ended with exit code {ended.returncode}:\n"
            f"{ended.stderr[-4000:]}"
        )
    return {name: Loop(**loop) for name, loop in json.loads(ended.stdout.splitlines()[-1]).items()}


def small(strategy: Any, num_steps: int) -> Loop:
    """Sums over replicas, each of the previous result: almost only dispatch."""

    def step(x):
        return tpudist.get_replica_context().all_reduce("mean", x) + 1

    mapped = jax.shard_map(
        lambda x: jax.lax.pmean(x, "replica") + 1,
        mesh=strategy.mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    by_hand = jax.jit(mapped)
    start = strategy.replicate(jnp.zeros((8,), jnp.float32))
    state = {"ours": start, "by hand": start}

    def ours():
        state["ours"] = strategy.run(step, args=(state["ours"],))
        return state["ours"]

    def waiting():
        state["by hand"] = by_hand(state["by hand"])
        state["by hand"].block_until_ready()

    return _loop(ours, waiting, num_steps)


def transformer(strategy: Any, num_steps: int) -> Loop:
    """Training steps of a small reference transformer with its optimizer."""
    config = TransformerConfig(num_layers=2, embed_dim=32, num_heads=2, mlp_dim=64)
    task = pairs.transformer(config, length=32)
    model = strategy.create(task.make_model)
    tx = optax.adamw(pairs.LEARNING_RATE)
    optimizer = strategy.create(lambda model: tpudist.Optimizer(tx, model), model)
    n = strategy.num_replicas_in_sync
    tokens = np.random.default_rng(0).integers(0, 256, (n, 1, 33), np.uint8)
    array = jax.device_put(tokens, strategy.replica_mesh.stacked)
    step = make_train_step(task.loss)

    graphdef, parameters = nnx.split(model)
    state = [jax.tree.map(jnp.copy, (nnx.as_pure(parameters), nnx.as_pure(optimizer.opt_state)))]
    task_by_hand = dataclasses.replace(task, batch_size=n)
    by_hand = pairs.jit_by_hand(task_by_hand, graphdef, tx, strategy.replica_mesh, state[0])
    rows = jax.device_put(tokens[:, 0], strategy.replica_mesh.stacked)

    def ours():
        return strategy.run(step, args=(model, optimizer, tpudist.PerReplica(array)))

    def waiting():
        *state[0], loss = by_hand(*state[0], rows)
        loss.block_until_ready()

    return _loop(ours, waiting, num_steps)


def _loop(ours: Callable[[], Any], waiting_by_hand: Callable[[], None], num_steps: int) -> Loop:
    jax.block_until_ready(ours())  # compiles
    ends = [time.perf_counter()]
    for _ in range(num_steps):
        last = ours()
        ends.append(time.perf_counter())
    jax.block_until_ready(last)
    ends[-1] = time.perf_counter()
    tenth = max(1, num_steps // 10)
    waiting_by_hand()
    start = time.perf_counter()
    for _ in range(tenth):
        waiting_by_hand()
    return Loop(
        num_steps,
        *(
            seconds / tenth * 1e3
            for seconds in (
                ends[tenth] - ends[0],
                ends[-1] - ends[-1 - tenth],
                time.perf_counter() - start,
            )
        ),
    )


def _main(num_devices: int, num_small_steps: int, num_transformer_steps: int) -> None:
    tpudist.emulate(num_devices)
    strategy = tpudist.MirroredStrategy()
    loops = {
        "small": small(strategy, num_small_steps),
        "transformer": transformer(strategy, num_transformer_steps),
    }
    print(json.dumps({name: dataclasses.asdict(loop) for name, loop in loops.items()}))


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
