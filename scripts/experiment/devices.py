"""The devices and the strategy of a run: as asked for, or what fits what is there."""

from __future__ import annotations

import os

import jax

import tpudist
from experiment import arguments

NUM_EMULATED = 8


def emulate(asked: int | None) -> str | None:
    """Emulates devices if that is asked for, or if there is nothing else; says why.

    Args:
        asked: How many; 0 for none, None for what fits.
    """
    if asked is not None:
        if asked:
            tpudist.emulate(asked)
        return "as asked" if asked else None
    if "TPUDIST_EMULATE" in os.environ:
        tpudist.emulate()
        return "as TPUDIST_EMULATE asks"
    if arguments.has_accelerator():
        return None
    tpudist.emulate(NUM_EMULATED)
    return "no accelerator in sight; --emulate 0 uses the CPU as it is"


def make_strategy(kind: str, axes: dict[str, int]) -> tpudist.Strategy:
    """The strategy asked for, or with "auto" what fits the devices there are.

    Args:
        kind: As the option `--strategy` says.
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
