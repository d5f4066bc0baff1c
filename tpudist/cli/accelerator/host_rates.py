"""Section "host": transfers, the input pipeline, checkpoints, and the time around a call."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tpudist.checkpoint.checkpoint import Checkpoint
from tpudist.cli.accelerator.item import Figures, Item, seconds_per_call
from tpudist.strategies.mirrored import MirroredStrategy

# Few arrays: with many, the time that each of them costs would hide the fixed time of a call.
NUM_ARRAYS = 10
_NUM_BATCHES = 20
_FLOATS_PER_MIB = 2**18


def make_items(devices: Sequence[jax.Device], is_small: bool) -> list[Item]:
    """Returns the items of the host; if `is_small`, little is transferred."""
    mebibytes = 4 if is_small else 256
    return [
        Item("host to device", functools.partial(_measure_to_device, devices[0], mebibytes)),
        Item("device to host", functools.partial(_measure_to_host, devices[0], mebibytes)),
        Item("input pipeline", functools.partial(_measure_input, devices, 1 if is_small else 16)),
        Item("checkpoint", functools.partial(_measure_checkpoint, devices, mebibytes)),
        Item("call of run", functools.partial(_measure_call, devices)),
    ]


def _measure_to_device(device: jax.Device, mebibytes: int) -> Figures:
    array = np.ones(mebibytes * _FLOATS_PER_MIB, np.float32)
    seconds = seconds_per_call(
        # Without aliasing: a CPU device would use the array of the host, and measure nothing.
        lambda: jax.device_put(array, device, may_alias=False).block_until_ready()
    )
    return {"seconds": seconds, "gbyte_per_s": array.nbytes / seconds / 1e9}


def _measure_to_host(device: jax.Device, mebibytes: int) -> Figures:
    array = jax.device_put(np.ones(mebibytes * _FLOATS_PER_MIB, np.float32), device)
    # JAX keeps the host's copy of an array, so each transfer needs a new array.
    add = jax.jit(lambda x: x + 1)

    def fetch() -> float:
        fresh = add(array).block_until_ready()
        started = time.perf_counter()
        np.array(fresh)
        return time.perf_counter() - started

    fetch()
    # The minimum: other work of the host can only slow a transfer down.
    seconds = min(fetch() for _ in range(5))
    return {"seconds": seconds, "gbyte_per_s": array.nbytes / seconds / 1e9}


def _measure_input(devices: Sequence[jax.Device], mebibytes: int) -> Figures:
    """Batches of a shuffled NumPy dataset through the distributed iterator, nothing computed."""
    strategy = MirroredStrategy(devices)
    # Rows of 32 KiB, about an image of 100 x 100 pixels in three channels; 4 batches in memory,
    # which `repeat` reads again and again.
    width = 2**15
    batch = max(mebibytes * 2**20 // width, len(devices))
    rows = np.zeros((4 * batch, width), np.uint8)
    data = strategy.experimental_make_numpy_dataset(rows).shuffle(seed=0).batch(batch)
    # The first batch is not timed: it starts the threads of the pipeline.
    batches = iter(strategy.experimental_distribute_dataset(data.repeat(_NUM_BATCHES)))
    jax.block_until_ready(next(batches))
    started = time.perf_counter()
    for _ in range(_NUM_BATCHES):
        jax.block_until_ready(next(batches))
    seconds = (time.perf_counter() - started) / _NUM_BATCHES
    num_bytes = batch * width
    return {"seconds": seconds, "num_bytes": num_bytes, "gbyte_per_s": num_bytes / seconds / 1e9}


def _measure_checkpoint(devices: Sequence[jax.Device], mebibytes: int) -> Figures:
    """Writes and reads a state, in the working directory, where runs keep theirs."""
    strategy = MirroredStrategy(devices)
    with strategy.scope():
        state = {"weights": jnp.arange(mebibytes * _FLOATS_PER_MIB, dtype=jnp.float32)}
    num_bytes = mebibytes * 2**20
    with tempfile.TemporaryDirectory(prefix=".tpudist-doctor-", dir=os.getcwd()) as folder:
        started = time.perf_counter()
        path = Checkpoint(state=state).write(os.path.join(folder, "state"))
        save_s = time.perf_counter() - started
        empty = {"weights": jnp.zeros_like(state["weights"])}
        restored = Checkpoint(state=empty)
        started = time.perf_counter()
        restored.read(path).assert_consumed()
        restore_s = time.perf_counter() - started
        # A checkpoint that is fast and wrong must fail: the values are compared bitwise.
        ok = bool(
            jnp.array_equal(restored.checkpoint_objects()["state"]["weights"], state["weights"])
        )
    return {
        "ok": ok,
        "num_bytes": num_bytes,
        "save_s": save_s,
        "restore_s": restore_s,
        "save_gbyte_per_s": num_bytes / save_s / 1e9,
        "restore_gbyte_per_s": num_bytes / restore_s / 1e9,
    }


def _measure_call(devices: Sequence[jax.Device]) -> Figures:
    """Times `run` and the same step by hand: `jit(shard_map)` over the same devices."""
    strategy = MirroredStrategy(devices)
    mesh = Mesh(np.array(devices), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, PartitionSpec())
    arrays = [jax.device_put(jnp.zeros(()), everywhere) for _ in range(NUM_ARRAYS)]

    def step(*arrays: jax.Array) -> list[jax.Array]:
        return [x + 1 for x in arrays]

    by_hand: Any = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    )
    hand_s = seconds_per_call(lambda: jax.block_until_ready(by_hand(*arrays)))
    run_s = seconds_per_call(lambda: jax.block_until_ready(strategy.run(step, args=tuple(arrays))))
    return {"seconds": run_s, "by_hand_s": hand_s, "num_arrays": NUM_ARRAYS}
