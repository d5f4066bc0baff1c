"""Growth of a save and of finding the newest step with the number of checkpoints in a directory."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, at_most, at_most_times
from tpudist.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint

SUITE = "directories of many checkpoints"
FEW, MANY = 10, 10_000
_REPEATS = 5
_LARGEST_MS = 30.0
_LARGEST_GROWTH = 2.0


def figures() -> Iterator[Figure]:
    """CPU milliseconds; the baseline is a directory of a few checkpoints."""
    few, many = _measure(FEW), _measure(MANY)
    for quantity in few:
        figure = Figure(SUITE, f"{MANY} checkpoints", quantity, many[quantity], few[quantity])
        if quantity.startswith("save"):
            yield at_most_times(figure, _LARGEST_GROWTH)
        else:
            yield at_most(figure, _LARGEST_MS)


def _measure(num_steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = Checkpoint(**{f"x{i}": np.arange(10.0) for i in range(50)})
        _fill(folder, checkpoint, num_steps)
        numbers = iter(range(num_steps + 1, num_steps + 100))
        with CheckpointManager(checkpoint, folder, max_to_keep=5, keep_period=1) as manager:

            def save() -> None:
                manager.save(next(numbers))
                manager.wait()

            save()
            return {
                "latest_step, ms of CPU": _cpu_ms(lambda: manager.latest_step),
                "latest_checkpoint(), ms of CPU": _cpu_ms(lambda: latest_checkpoint(folder)),
                "save, ms of CPU": _cpu_ms(save),
            }


def _fill(folder: Path, checkpoint: Checkpoint, num_steps: int) -> None:
    # Steps that only have their description: no figure reads arrays.
    with CheckpointManager(checkpoint, folder, max_to_keep=None) as manager:
        manager.save(1)
    contents = json.loads((folder / "1" / "tpudist" / "metadata").read_text())
    for step in range(2, num_steps + 1):
        (folder / str(step) / "tpudist").mkdir(parents=True)
        text = json.dumps(contents | {"step": step})
        (folder / str(step) / "tpudist" / "metadata").write_text(text)
        shutil.copy(folder / "1" / "commit_success.txt", folder / str(step))


def _cpu_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * min(times)
