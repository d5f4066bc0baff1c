"""Finds devices by name, and refuses those that are not there."""

from collections.abc import Sequence
from typing import Any

import jax

from tpudist.options import shorten


def as_devices(
    devices: Sequence[jax.Device | str] | None, *, local: bool = False
) -> list[jax.Device]:
    """JAX devices for devices or names such as `cpu:0`, `TPU:3` or `/device:GPU:1`.

    Args:
        devices: None for all of the default platform.
        local: Only devices of this process.

    Raises:
        ValueError: None at all, a device that does not exist, or one that belongs to another
            process with `local`.
    """
    if devices is None:
        return jax.local_devices() if local else jax.devices()
    named: Any = [devices] if isinstance(devices, str | jax.Device) else list(devices)
    if not named:
        raise ValueError(
            f"devices={devices!r} names no device. Omit it to use all devices, or name the devices "
            "to use, such as jax.devices()[:2]."
        )
    found = [_find(d) if isinstance(d, str) else d for d in named]
    for device in found:
        if not isinstance(device, jax.Device):
            raise ValueError(
                f"A device was named by {shorten(device)} of type {type(device).__name__}. Use one "
                "of jax.devices(), or a name such as 'cpu:0'."
            )
        if local and device.process_index != jax.process_index():
            raise ValueError(
                f"Device {device} belongs to process {device.process_index}, but this is process "
                f"{jax.process_index()}. Use MultiWorkerMirroredStrategy for several processes."
            )
    return found


def _find(name: str) -> jax.Device:
    platform, _, number = name.lower().split("device:")[-1].strip("/").partition(":")
    try:
        candidates = jax.devices(platform)
    except RuntimeError:
        candidates = []
    index = int(number) if number.isdigit() else 0 if platform and not number else -1
    if not 0 <= index < len(candidates):
        have = ", ".join(f"{d.platform}:{i}" for i, d in enumerate(jax.devices()))
        raise ValueError(
            f"Device {name!r} does not exist. This run has {have}. (tpudist.emulate(n) makes n CPU "
            "devices; call it before the first array is made.)"
        )
    return candidates[index]
