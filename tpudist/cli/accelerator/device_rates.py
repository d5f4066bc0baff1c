"""Sections "compute" and "collectives": rates of the devices, measured and as plans estimate them.

Each program repeats one operation in a loop, so that the time of a call does not count. The same
program is planned for the same devices: the report has the measured and the estimated time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.cli.accelerator.item import Figures, Item, seconds_per_call
from tpudist.strategies.mirrored import MirroredStrategy
from tpudist.strategy.strategy import Strategy
from tpudist.xla.mesh import REPLICA_AXIS

LONG_S = 0.2
"""Seconds that a program should run; its loop is made that long."""
# Sides of square matrices. 8192 in float32 are 256 MiB per matrix, which every TPU can hold.
MATMULS = (1024, 2048, 4096, 8192)
# Bytes: 4 MiB to 256 MiB. The largest exceeds the VMEM of any chip, so it measures HBM.
COPIES = tuple(2**power for power in (22, 24, 26, 28))
# Bytes per device: 4 KiB, which is latency only, to 64 MiB, which is bandwidth only.
MESSAGES = tuple(2**power for power in (12, 16, 20, 24, 26))
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute")
# Iterations of a loop: enough to keep it a loop, and a bound of the time if the clock reads 0.
_MIN_LENGTH, _MAX_LENGTH = 4, 10_000
Body = Callable[[jax.Array], jax.Array]


def make_compute_items(devices: Sequence[jax.Device], is_small: bool) -> list[Item]:
    """Returns matrix products in two types, and copies, by size: if `is_small`, the smallest."""
    strategy = MirroredStrategy(devices)
    items = []
    for dtype in ("bfloat16", "float32"):
        for size in MATMULS[:1] if is_small else MATMULS:
            measure = functools.partial(_measure_matmul, strategy, dtype, size)
            items.append(Item(f"matmul {dtype} {size} x {size}", measure))
    for num_bytes in COPIES[:1] if is_small else COPIES:
        measure = functools.partial(_measure_copy, strategy, num_bytes)
        items.append(Item(f"memory {_size(num_bytes)}", measure))
    return items


def make_collective_items(devices: Sequence[jax.Device], is_small: bool) -> list[Item]:
    """Returns each collective over all devices, by size of what one device holds."""
    if len(devices) < 2:
        return []
    strategy = MirroredStrategy(devices)
    return [
        Item(
            f"{kind} {_size(num_bytes)}",
            functools.partial(_measure_collective, strategy, kind, num_bytes),
        )
        for kind in COLLECTIVES
        for num_bytes in (MESSAGES[:2] if is_small else MESSAGES)
    ]


def _measure_matmul(strategy: Strategy, dtype: str, size: int) -> Figures:
    weights = np.random.default_rng(0).normal(size=(size, size), scale=size**-0.5)
    weights = jnp.asarray(weights, dtype)
    figures = _measure(strategy, lambda x, w: (x @ w).astype(dtype), weights, weights)
    # A product of n x n matrices has n**3 multiplications and as many additions.
    return {**figures, "tflop_per_s": 2 * size**3 / figures["seconds"] / 1e12, "dtype": dtype}


def _measure_copy(strategy: Strategy, num_bytes: int) -> Figures:
    # Not a plain copy, which XLA would remove from the loop. Bytes count twice: read and written.
    figures = _measure(strategy, lambda x: x * 1.0001, jnp.ones(num_bytes // 4, jnp.float32))
    return {**figures, "gbyte_per_s": 2 * num_bytes / figures["seconds"] / 1e9}


def _measure_collective(strategy: Strategy, kind: str, num_bytes: int) -> Figures:
    count = strategy.num_replicas_in_sync
    length = max(num_bytes // 4 // count, 1) * count
    figures = _measure(strategy, _collective(kind, count), jnp.ones(length, jnp.float32))
    # Bytes that a device sends in a ring, as a multiple of its array: the default, (n - 1) / n, is
    # for reduce-scatter and all-to-all. In an all-gather a device passes on n - 1 arrays of this
    # size.
    sent = {"all-reduce": 2 * (count - 1) / count, "permute": 1.0, "all-gather": count - 1}
    num_sent = 4 * length * sent.get(kind, (count - 1) / count)
    return {
        **figures,
        "kind": kind,
        "num_bytes": 4 * length,
        "gbyte_per_s": num_sent / figures["seconds"] / 1e9,
    }


def _collective(kind: str, count: int) -> Body:
    """Returns a collective whose result has the shape of its argument."""

    # Sums are divided by their number of terms, so that values stay finite over thousands of
    # iterations: an infinite result would fail the item ("wrong numbers").
    def all_gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, REPLICA_AXIS).sum(0) / count

    def reduce_scatter(x: jax.Array) -> jax.Array:
        return jnp.tile(jax.lax.psum_scatter(x, REPLICA_AXIS, tiled=True) / count, count)

    def all_to_all(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x.reshape(count, -1), REPLICA_AXIS, 0, 0).reshape(-1)

    def permute(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, REPLICA_AXIS, [(i, (i + 1) % count) for i in range(count)])

    bodies: dict[str, Body] = {
        "all-reduce": lambda x: jax.lax.psum(x, REPLICA_AXIS) / count,
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
        "all-to-all": all_to_all,
        "permute": permute,
    }
    return bodies[kind]


def _measure(
    strategy: Strategy, body: Callable[..., jax.Array], x: jax.Array, *rest: jax.Array
) -> Figures:
    """Measures one operation in a loop whose length fits its time, and plans the same program."""
    # Two measurements: a few iterations show how long one takes, and then the loop lasts `LONG_S`.
    once = _time(strategy, body, _MIN_LENGTH, x, *rest) / _MIN_LENGTH
    length = int(min(max(LONG_S / max(once, 1e-9), _MIN_LENGTH), _MAX_LENGTH))
    seconds = _time(strategy, body, length, x, *rest) / length
    return {"seconds": seconds, "estimated_s": _estimate(strategy, body, length, x, *rest)}


def _time(
    strategy: Strategy, body: Callable[..., jax.Array], length: int, *args: jax.Array
) -> float:
    step = _loop(body, length)
    return seconds_per_call(lambda: jax.block_until_ready(strategy.run(step, args=args)))


def _estimate(
    strategy: Strategy, body: Callable[..., jax.Array], length: int, *args: jax.Array
) -> float | None:
    """Returns the time that a plan for these devices says; None for devices without rates."""
    plan = strategy.plan(_loop(body, length), args, cache=False)
    return None if plan.time is None else plan.time.step_s / length


# Cached, so that the timed and the planned step are the same function.
@functools.cache
def _loop(body: Callable[..., jax.Array], length: int) -> Callable[..., jax.Array]:
    def step(x: jax.Array, *rest: jax.Array) -> jax.Array:
        # Adding 0 times the replica number makes the value vary over replicas in the eyes of the
        # compiler, which would remove collectives of equal values.
        varying = x + jax.lax.axis_index(REPLICA_AXIS).astype(x.dtype) * 0
        return jax.lax.fori_loop(0, length, lambda _, y: body(y, *rest), varying)

    return step


def _size(num_bytes: int) -> str:
    for unit, number in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= number:
            return f"{num_bytes / number:g} {unit}"
    return f"{num_bytes} B"
