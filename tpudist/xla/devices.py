"""Finds devices by name, and the slices of devices."""

from collections.abc import Sequence
from typing import Any

import jax

from tpudist.options import shorten
from tpudist.options.member_names import format_numbers
from tpudist.xla import internals


def as_devices(
    devices: Sequence[jax.Device | str] | None, *, local: bool = False
) -> list[jax.Device]:
    """Returns JAX devices for devices or names such as `cpu:0`, `TPU:3` or `/device:GPU:1`.

    Args:
        devices: Devices or their names; None for all devices of the default platform.
        local: Whether all devices must belong to this process.

    Raises:
        ValueError: If `devices` is empty, a device does not exist, or a device belongs to another
            process although `local` is true.
    """
    if devices is None:
        return jax.local_devices() if local else jax.devices()
    named: list[Any] = [devices] if isinstance(devices, str | jax.Device) else list(devices)
    if not named:
        raise ValueError(
            f"devices={devices!r} names no device. Omit it to use all devices, or name the devices "
            "to use, such as jax.devices()[:2]."
        )
    found = []
    for item in named:
        device = _find(item) if isinstance(item, str) else item
        if not isinstance(device, jax.Device):
            raise ValueError(
                f"A device was named by {shorten(device)} of type {type(device).__name__}. Use one "
                "of jax.devices(), or a name such as 'cpu:0'."
            )
        # Descriptions belong to no process: a strategy on them compiles, and runs nothing.
        is_elsewhere = device.process_index != jax.process_index()
        if local and is_elsewhere and not internals.is_described(device):
            raise ValueError(
                f"Device {device} belongs to process {device.process_index}, but this is process "
                f"{jax.process_index()}. Use MultiWorkerMirroredStrategy for several processes."
            )
        found.append(device)
    return found


def slice_index(device: jax.Device) -> int:
    """Returns the number of the slice of a device; 0 if there is only one slice."""
    # Only JAX's TPU devices of several slices have the attribute, and it may be None.
    return getattr(device, "slice_index", None) or 0


def coords_of(device: jax.Device) -> Sequence[int] | None:
    """Returns the coordinates of a device in its slice; None for devices other than TPUs."""
    return getattr(device, "coords", None)


def _find(name: str) -> jax.Device:
    # "/job:worker/task:0/device:GPU:1", as TensorFlow writes it, becomes "gpu:1".
    platform, _, number = name.lower().split("device:")[-1].strip("/").partition(":")
    try:
        candidates = jax.devices(platform)
    except RuntimeError:
        candidates = []
    if number.isdigit():
        index = int(number)
    else:  # "gpu" means "gpu:0"; anything else is not found
        index = 0 if platform and not number else -1
    if not 0 <= index < len(candidates):
        local = jax.devices()
        have = f"{local[0].platform}:{format_numbers(range(len(local)))}"
        raise ValueError(
            f"Device {name!r} does not exist. This run has {have}. (tpudist.emulate(n) makes n CPU "
            "devices; call it before the first array is made.)"
        )
    return candidates[index]
