"""Bytes read and CPU seconds of a save, in each process, for `scale_saves.py`.

Started by `tpudist launch`; each process prints its figures, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import tpudist

ROWS = 16
_REPEATS = 3


def measure(folder: Path, megabytes: int) -> dict[str, float]:
    """Returns the figures of the cheapest of several saves; the first one imports Orbax."""
    if int(os.environ["TPUDIST_NUM"]) > 1:
        tpudist.MultiWorkerMirroredStrategy()
    mesh = tpudist.TPUStrategy().mesh
    values = np.random.default_rng(0).integers(0, 2**31, (ROWS, megabytes * 2**20 // 64), np.int32)
    sharding = NamedSharding(mesh, P("replica"))
    state = jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
    found: list[dict[str, float]] = []
    with tpudist.checkpoint.CheckpointManager(
        tpudist.checkpoint.Checkpoint(state=state), folder, max_to_keep=1
    ) as manager:
        for step in range(1 + _REPEATS):
            bytes_read, cpu_s = _bytes_read(), time.process_time()
            manager.save(step)
            manager.wait()
            figures = {"bytes": _bytes_read() - bytes_read, "cpu_s": time.process_time() - cpu_s}
            found.append(figures | {"process": jax.process_index()})
    return min(found[1:], key=lambda x: x["cpu_s"])


def _bytes_read() -> int:
    # All reads of files by this process, with those of TensorStore's threads.
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    tpudist.emulate(int(os.environ["TPUDIST_EMULATE"]))
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))), flush=True)
