"""Pretrained weights: how long they take to be read, against Orbax, and what a host holds then.

Both read the same arrays, of Llama-3.1-8B's shape except for the number of layers, to 8 emulated
devices that split them (`fsdp=8`), from files that the system has in memory; in turns, and the
figures are medians. Orbax has them as the devices do; a checkpoint of other libraries has each
matrix transposed.

A process measures memory: it reads all layers from a sparse file of zeros. The figure is its peak
resident memory (`VmHWM`, including mapped pages of the file) minus the memory before and minus the
arrays, which belong to the emulated devices. If the machine has too little memory for all layers,
the process reads as many as fit.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

import tpudist
from benchmarks.figures import Figure, at_most, at_most_times
from tpudist.models import Transformer, TransformerConfig, load_pretrained, save_pretrained
from tpudist.models.presets import PRESETS
from tpudist.models.pretrained.config_export import make_config
from tpudist.models.pretrained.safetensors_file import make_header
from tpudist.models.pretrained.tensor_places import tensor_places

SUITE = "weights"
REPEATS = 3
MOST_GB = 4.0
CONFIG = PRESETS["llama-3.1-8b"].config
_ROOT = Path(__file__).resolve().parents[2]


def figures(num_layers: int) -> Iterator[Figure]:
    """The figures of a model of this many layers, and the memory of one of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _times(Path(folder), dataclasses.replace(CONFIG, num_layers=num_layers))
    with tempfile.TemporaryDirectory() as folder:
        yield from _memory(Path(folder))


def _times(folder: Path, config: TransformerConfig) -> Iterator[Figure]:
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 8})
    model = strategy.create(lambda: _in_bfloat16(Transformer(config, rngs=nnx.Rngs(0))))
    save_pretrained(model, folder / "hub")
    state = nnx.to_pure_dict(nnx.state(model))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", state)
    del model, state

    def ours() -> Any:
        with strategy.scope():
            return nnx.state(load_pretrained(folder / "hub"))

    def orbax() -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(folder / "orbax", target)

    seconds = _in_turns(ours, orbax)
    subject = f"{size / 1e9:.2f} GB in bfloat16, over 8 devices"
    rates = [size / 1e9 / statistics.median(times) for times in seconds]
    yield Figure(SUITE, subject, "GB/s (baseline: Orbax)", *rates)
    medians = (statistics.median(times) for times in seconds)
    details = {"ours": seconds[0], "orbax": seconds[1]}
    read = Figure(SUITE, subject, "s to read (baseline: Orbax)", *medians, details=details)
    yield at_most_times(read, 1.0)


def _in_bfloat16(model: Transformer) -> Transformer:
    for variable in jax.tree.leaves(
        nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        variable.set_value(variable.get_value().astype("bfloat16"))
    return model


def _in_turns(*runs: Callable[[], Any]) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in runs]
    for repeat in range(REPEATS + 1):
        for times, run in zip(found, runs, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            if repeat:  # the first one finds files that are not in memory
                times.append(time.perf_counter() - start)
    return found


def _memory(folder: Path) -> Iterator[Figure]:
    """Measures reading all layers, in a separate process."""
    layer = _num_bytes(1) - _num_bytes(0)
    fits = int((_available_bytes() - 3e9 - _num_bytes(0)) // layer)
    config = dataclasses.replace(CONFIG, num_layers=max(1, min(CONFIG.num_layers, fits)))
    write_zeros(config, folder)
    command = [sys.executable, "-m", "benchmarks.weights_memory", str(folder)]
    done = subprocess.run(
        command, cwd=_ROOT / "scripts", capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    subject = f"{found['held'] / 1e9:.1f} GB, {config.num_layers} layers, over 8 devices"
    rise = Figure(
        SUITE, subject, "GB of the host in addition to the arrays", found["rise"] / 1e9, None
    )
    yield at_most(dataclasses.replace(rise, details=found), MOST_GB)
    alone = found["anonymous_rise"] / 1e9
    yield Figure(SUITE, subject, "GB of that without pages of files", alone, None)
    yield Figure(SUITE, subject, "s to read, from a file of zeros", found["seconds"], None)


def write_zeros(config: TransformerConfig, folder: Path) -> None:
    """A checkpoint of zeros, which takes no room on a disk that knows holes."""
    places = list(tensor_places(config))
    start = make_header((place.tensor, "BF16", place.shape) for place in places)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(start)
        file.truncate(len(start) + sum(2 * int(np.prod(place.shape)) for place in places))
    (folder / "config.json").write_text(json.dumps(make_config(config, "bfloat16")))


def _num_bytes(num_layers: int) -> int:
    places = tensor_places(dataclasses.replace(CONFIG, num_layers=1))
    sizes = {p.tensor: 2 * int(np.prod(p.shape)) for p in places}
    of_layer = sum(size for name, size in sizes.items() if ".layers." in name)
    return sum(sizes.values()) + (num_layers - 1) * of_layer


def _available_bytes() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("MemAvailable")]
    return 1024.0 * int(line.split()[1])
