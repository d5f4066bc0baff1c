"""Reads and checks options before any work begins; raises `ValueError`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpudist.strategy import logical_axes
from tpudist.training.arguments import check_not_negative, check_positive, parse_axes

__all__ = [
    "check_folder",
    "check_microbatches",
    "check_not_negative",
    "check_positive",
    "check_split",
    "has_accelerator",
    "parse_axes",
]


def check_split(
    dims: Mapping[str, tuple[str, int]],
    rules: Sequence[tuple[str, Any]],
    mesh_shape: Mapping[str, int],
) -> None:
    """Rejects a dim whose size the mesh axes that split it do not divide.

    Args:
        dims: For each option, the logical name of the dim that it sizes, and the size.
        rules: Pairs of a logical name and a mesh axis, or several, or None.
        mesh_shape: Sizes of the mesh axes.
    """
    for option, (name, size) in dims.items():
        axes = dict(rules).get(name) or ()
        axes = (axes,) if isinstance(axes, str) else axes
        num_parts = math.prod(mesh_shape[axis] for axis in axes)
        if size % num_parts:
            over = ", ".join(f"{axis}={mesh_shape[axis]}" for axis in axes)
            raise ValueError(
                f"--{option} is {size}. The strategy splits it over {over}, so it must be a "
                f"multiple of {num_parts}. Change --{option}, or use a smaller axis."
            )


def check_microbatches(microbatches: int, batch_size: int, num_replicas: int) -> None:
    """Refuses parts that the rows of a replica do not divide into."""
    rows = -(-batch_size // num_replicas)
    if rows % microbatches:
        raise ValueError(
            f"--microbatches is {microbatches}, but it must divide the {rows} example(s) that each "
            f"of {num_replicas} replica(s) gets from --batch-size {batch_size}. Use --batch-size "
            f"{num_replicas * microbatches * -(-rows // microbatches)}, or another --microbatches."
        )


def check_axes(text: str, strategy: str) -> dict[str, int]:
    """The axes inside a replica, if `--strategy` has replicas with any."""
    axes = parse_axes(text)
    if axes and strategy not in ("auto", "tpu"):
        raise ValueError(
            f"--replica-axes {text} does not apply to --strategy {strategy}, which has one device "
            f"per replica. Use --strategy tpu, or omit --replica-axes."
        )
    try:
        logical_axes.refuse_other_axes(axes)
    except ValueError as error:
        raise ValueError(f"--replica-axes {text}: {error}") from error
    return axes


def check_folder(path: Path) -> Path:
    """Makes the folder `path` if need be, and makes sure that it can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {path}: cannot create this folder: {error.strerror}. Use another folder."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(
            f"--out {path}: no permission to write there. Use another folder, or change its mode."
        )
    return path


def has_accelerator() -> bool:
    """Returns whether this machine seems to have an accelerator, without starting JAX.

    A backend that has started cannot emulate devices any more. Looks at
    `JAX_PLATFORMS`, then at the device files of TPUs, NVIDIA and AMD GPUs.
    """
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if wanted:
        return wanted.split(",")[0].strip() != "cpu"
    devices = ("accel0", "vfio/0", "nvidiactl", "kfd")
    return any(Path("/dev", name).exists() for name in devices)
