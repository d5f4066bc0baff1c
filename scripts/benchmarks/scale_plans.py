"""Growth of the time and size of a plan with the slice: one small step, 8 to 4096 chips."""

from __future__ import annotations

import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import tpudist
from benchmarks.figures import Figure
from tpudist.models import MLP
from tpudist.planner import GlobalBatch
from tpudist.training.steps import make_train_step

SUITE = "plans of larger slices"
# (slice, axes of a replica): one device, and 16.
SLICES = (
    ("v5e-8", {}),
    ("v5e-64", {}),
    ("v5e-256", {}),
    ("v5p-128", {"fsdp": 16}),
    ("v5p-2048", {"fsdp": 16}),
    ("v5p-8192", {"fsdp": 16}),
    ("2xv5e-256", {}),
    ("2xv5e-256", {"fsdp": 16}),
)
_DIM = 512


def figures() -> Iterator[Figure]:
    """Seconds to compile and to plan, and the bytes of the plan, for each slice; none is cached."""
    for topology, axes in SLICES:
        strategy = tpudist.TPUStrategy(
            replica_axes=axes or None, devices=tpudist.planner.devices(topology)
        )
        num_chips = tpudist.planner.parse_topology(topology).num_chips
        model = strategy.create_abstract(lambda: MLP([_DIM, 4 * _DIM, _DIM], rngs=nnx.Rngs(0)))
        optimizer = strategy.create_abstract(
            lambda model: tpudist.Optimizer(optax.adamw(1e-3), model), model
        )
        batch = jax.ShapeDtypeStruct((8 * num_chips, _DIM), jnp.float32)
        step = make_train_step(lambda model, x: jnp.square(model(x) - x).mean(axis=-1))
        start = time.perf_counter()
        plan = strategy.plan(step, (model, optimizer, GlobalBatch(batch)), cache=False)
        seconds = time.perf_counter() - start
        where = ", ".join(f"{name}={size}" for name, size in axes.items()) or "data parallel"
        subject = f"{topology}: {num_chips} chips, {where}"
        size = len(plan.to_json())
        yield Figure(SUITE, subject, "compile, s", plan.compile_s, None)
        yield Figure(SUITE, subject, "plan in all, s", seconds, None)
        yield Figure(SUITE, subject, "plan, bytes of JSON", size, None)
