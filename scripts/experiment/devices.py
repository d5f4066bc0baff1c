"""Chooses the devices and the strategy of a run."""

from __future__ import annotations

import os

import jax

import tpudist
from experiment import arguments

NUM_EMULATED = 8


def emulate(asked: int | None) -> str | None:
    """Emulates devices on request or if no accelerator exists; returns the reason, if it does.

    Args:
        asked: Number of devices; 0 for none, None to decide by the machine.
    """
    if asked is not None:
        if asked:
            tpudist.emulate(asked)
        return f"--emulate {asked}" if asked else None
    if "TPUDIST_EMULATE" in os.environ:
        tpudist.emulate()
        return f"TPUDIST_EMULATE={os.environ['TPUDIST_EMULATE']}"
    if arguments.has_accelerator():
        return None
    tpudist.emulate(NUM_EMULATED)
    return "found no accelerator; use --emulate 0 for a single CPU device"


def make_strategy(kind: str, axes: dict[str, int]) -> tpudist.Strategy:
    """Returns the strategy `kind`; "auto" selects a strategy that fits the devices.

    Args:
        kind: Value of the option `--strategy`.
        axes: Mesh axes inside a replica.
    """
    if kind == "auto":
        if axes:
            kind = "tpu"
        elif "TF_CONFIG" in os.environ:
            kind = "multi_worker"
        elif jax.default_backend() == "tpu":
            kind = "tpu"
        else:
            kind = "mirrored" if jax.device_count() > 1 else "one_device"
    make = {
        "tpu": lambda: tpudist.TPUStrategy(replica_axes=axes or None),
        "multi_worker": tpudist.MultiWorkerMirroredStrategy,
        "mirrored": tpudist.MirroredStrategy,
        "one_device": tpudist.OneDeviceStrategy,
    }
    return make[kind]()
