"""Checkpoints: how long a save blocks, and what a save and a restore take, against only Orbax.

Orbax alone is `orbax.checkpoint.CheckpointManager` with its defaults: no checksums, so a flipped
bit in its files is restored as it is. Both write to the same disk, in turns; figures are medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P

import tpudist
from benchmarks.figures import Figure, at_most

SUITE = "checkpoints"
NUM_ARRAYS = 25
LARGEST_SHARE = 0.15


@dataclass
class Times:
    """Seconds of one save and one restore."""

    blocking: float
    total: float
    restore: float
    verify: float = 0.0


def figures(megabytes: int, repeats: int) -> Iterator[Figure]:
    """The figures of a state split over all devices, and of a mirrored state."""
    mesh = tpudist.MirroredStrategy().mesh
    for subject, spec in (
        (f"{megabytes} MB, split over {mesh.size} devices", P("replica")),
        (f"{megabytes} MB, mirrored on {mesh.size} devices", P()),
    ):
        state = _state(megabytes, NamedSharding(mesh, spec))
        ours, orbax = [], []
        for repeat in range(repeats + 1):
            for found, measure in ((ours, _ours), (orbax, _orbax)):
                with tempfile.TemporaryDirectory() as folder:
                    times = measure(Path(folder), state)
                if repeat:  # the first compiles and imports
                    found.append(times)
        yield from _compared(subject, ours, orbax)


def _compared(subject: str, ours: list[Times], orbax: list[Times]) -> Iterator[Figure]:
    def median(times: list[Times], name: str) -> float:
        return statistics.median(getattr(x, name) for x in times)

    details = {"ours": [vars(x) for x in ours], "orbax": [vars(x) for x in orbax]}
    shares = [statistics.median(x.blocking / x.total for x in times) for times in (ours, orbax)]
    yield at_most(
        Figure(SUITE, subject, "share of a save that blocks", *shares, details=details),
        LARGEST_SHARE,
    )
    for name, quantity in (
        ("blocking", "ms that a save blocks"),
        ("total", "ms until it is on the disk"),
        ("restore", "ms to restore, with checksums verified"),
    ):
        yield Figure(SUITE, subject, quantity, 1e3 * median(ours, name), 1e3 * median(orbax, name))
    yield Figure(
        SUITE,
        subject,
        "ms of that to verify (baseline: Orbax's restore)",
        1e3 * median(ours, "verify"),
        1e3 * median(orbax, "restore"),
    )


def _state(megabytes: int, sharding: NamedSharding) -> dict[str, jax.Array]:
    """Random float32 arrays, which do not compress."""
    rows = megabytes * 10**6 // (4 * 1024 * NUM_ARRAYS) // 8 * 8
    rng = np.random.default_rng(0)
    return {
        f"layer_{i}": jax.device_put(rng.random((rows, 1024), np.float32), sharding)
        for i in range(NUM_ARRAYS)
    }


def _ours(folder: Path, state: dict[str, jax.Array]) -> Times:
    checkpoint = tpudist.checkpoint.Checkpoint(state=state)
    with tpudist.checkpoint.CheckpointManager(checkpoint, folder) as manager:
        start = time.perf_counter()
        manager.save(1)
        blocking = time.perf_counter() - start
        manager.wait()
        total = time.perf_counter() - start
        start = time.perf_counter()
        manager.restore()
        jax.block_until_ready(checkpoint.state)  # type: ignore[attr-defined]
        restore = time.perf_counter() - start
        start = time.perf_counter()
        problems = manager.verify(1)
        verify = time.perf_counter() - start
        assert problems == [], problems
    return Times(blocking, total, restore, verify)


def _orbax(folder: Path, state: dict[str, jax.Array]) -> Times:
    def abstract(x: jax.Array) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    with ocp.CheckpointManager(folder) as manager:
        start = time.perf_counter()
        manager.save(1, args=ocp.args.StandardSave(state))
        blocking = time.perf_counter() - start
        manager.wait_until_finished()
        total = time.perf_counter() - start
        start = time.perf_counter()
        target = jax.tree.map(abstract, state)
        jax.block_until_ready(manager.restore(1, args=ocp.args.StandardRestore(target)))
        restore = time.perf_counter() - start
    return Times(blocking, total, restore)
