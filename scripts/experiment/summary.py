"""Describes the strategy of a run and the placement of its variables."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import jax
from flax import nnx

from tpudist.strategy.strategy import Strategy
from tpudist.xla.estimate.sizes import format_bytes

PyTree = Any


def count_parameters(model: nnx.Module) -> int:
    """Returns the number of elements in all parameters of `model`."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def describe_placement(tree: PyTree) -> str:
    """Describes where arrays are, such as "3.6 MB split over fsdp (925 kB per device)".

    Reads shardings only, so that it also works where another process holds part of an array.
    """
    total: dict[tuple[str, ...], int] = defaultdict(int)
    per_device: dict[tuple[str, ...], int] = defaultdict(int)
    num_devices = 1
    for array in _arrays(tree):
        axes = _split_axes(array.sharding)
        itemsize = array.dtype.itemsize
        total[axes] += array.size * itemsize
        per_device[axes] += math.prod(array.sharding.shard_shape(array.shape)) * itemsize
        num_devices = max(num_devices, array.sharding.num_devices)
    parts = []
    for axes in sorted(total, key=lambda axes: -total[axes]):
        if axes:
            how = f"split over {' and '.join(axes)} ({format_bytes(per_device[axes])} per device)"
        elif num_devices == 1:
            how = "on 1 device"
        else:
            how = f"replicated on {num_devices} devices"
        parts.append(f"{format_bytes(total[axes])} {how}")
    return ", ".join(parts) or "none"


def describe_strategy(strategy: Strategy) -> str:
    """Returns such as "TPUStrategy: 4 replicas on 8 emulated CPU devices (replica 4 x fsdp 2)"."""
    replicas, mesh = strategy.num_replicas_in_sync, strategy.mesh
    kind = describe_kind(mesh.devices.flat[0])
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return (
        f"{type(strategy).__name__}: {replicas} replica{'s' if replicas > 1 else ''} on "
        f"{mesh.size} {kind} device{'s' if mesh.size > 1 else ''}"
        f"{f' ({axes})' if len(mesh.shape) > 1 else ''}"
    )


def describe_kind(device: jax.Device) -> str:
    """Returns such as "TPU v5e", "NVIDIA H100" or "emulated CPU"."""
    if device.platform != "cpu":
        return device.device_kind.replace("v5 lite", "v5e").replace("v6 lite", "v6e")
    # A host has one CPU device, unless more are emulated.
    return "emulated CPU" if jax.local_device_count("cpu") > 1 else "CPU"


def _arrays(tree: PyTree) -> list[jax.Array]:
    state = nnx.state(tree) if isinstance(tree, nnx.Module | nnx.Optimizer) else tree
    return [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]


def _split_axes(sharding: jax.sharding.Sharding) -> tuple[str, ...]:
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return ()
    names: list[str] = []
    for part in sharding.spec:
        for axis in (part,) if isinstance(part, str) else part or ():
            if sharding.mesh.shape[axis] > 1 and axis not in names:
                names.append(axis)
    return tuple(sorted(names))
