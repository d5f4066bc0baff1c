"""Emulates several devices in one CPU process, so that a program for a slice runs on a laptop.

A supervisor calls `environment_of`. It does not import JAX, which takes half a second, so this
module imports JAX where it is needed.
"""

import operator
import os
from pathlib import Path

from tpudist.options import shorten

ENVIRONMENT_VARIABLE = "TPUDIST_EMULATE"


def has_backend() -> bool:
    """Whether this process already has devices, so that it is too late to choose them."""
    from tpudist.xla.settings import Setting

    number = Setting.NUM_CPU_DEVICES.read()
    # JAX raises an error for another number of CPU devices once a backend runs. Trying that is the
    # only public check that does not start a backend.
    try:
        Setting.NUM_CPU_DEVICES.set(max(number, 1) + 1)
    except RuntimeError:
        return True
    Setting.NUM_CPU_DEVICES.set(number)
    return False


def emulate(num_devices: int | None = None, *, unless_accelerators: int | None = None) -> None:
    """Emulates `num_devices` devices on the CPU of this process, as if each were a chip of a slice.

    Call it before any other operation uses a device. A second call with the same number does
    nothing.

    Args:
        num_devices: Number of devices; by default the environment variable `TPUDIST_EMULATE`, or 8.
        unless_accelerators: Number of accelerators from which the process uses them instead. A
            program with `unless_accelerators=1` runs on the TPUs or GPUs of a machine, and on
            emulated devices if it has none. By default, devices are always emulated.

    Raises:
        ValueError: If `num_devices` is not a positive number.
        RuntimeError: If JAX has already started with other devices.
    """
    import jax

    from tpudist.xla.settings import Setting

    num_devices = _parse_num_devices(num_devices)
    if unless_accelerators is not None and has_accelerators(unless_accelerators):
        return
    os.environ["NPROC"] = str(max(num_threads(num_devices), int(os.environ.get("NPROC", "0") or 0)))
    if not has_backend():
        # Not started here: several emulated processes must connect first.
        Setting.PLATFORMS.set("cpu")
        Setting.NUM_CPU_DEVICES.set(num_devices)
        return
    devices = jax.local_devices()
    if len(devices) != num_devices or devices[0].platform != "cpu":
        raise RuntimeError(
            f"emulate({num_devices}): JAX has already started with {len(devices)} "
            f"{devices[0].platform} device(s), and a process chooses its devices once. Call "
            f"tpudist.emulate({num_devices}) before the first array is made, or start Python with "
            f"{ENVIRONMENT_VARIABLE}={num_devices} and call tpudist.emulate()."
        )


def has_accelerators(number: int = 1, dev: Path = Path("/dev")) -> bool:
    """Returns whether JAX would use at least `number` accelerators, without starting JAX.

    The environment variable `JAX_PLATFORMS` decides if it is set, for any `number`. Otherwise the
    device files of TPUs and of NVIDIA and AMD GPUs are counted.

    Args:
        number: Number of accelerators.
        dev: Folder of device files.
    """
    if platforms := os.environ.get("JAX_PLATFORMS", ""):
        return platforms.split(",")[0].strip() != "cpu"
    patterns = ["accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*"]
    patterns += ["dri/renderD*"] if (dev / "kfd").exists() else []  # AMD; displays have one too
    return any(len([*dev.glob(pattern)]) >= number for pattern in patterns)


def num_threads(num_devices: int) -> int:
    """Returns the size of XLA's thread pool, for `NPROC`."""
    # XLA:CPU runs each device's part of a step in this pool. If it has fewer threads than the steps
    # in flight need, an all-reduce waits for threads that are waiting for it, and XLA aborts the
    # process after 40 s. This size was always enough; 12 threads for 8 devices were not (jax 0.10,
    # two cores).
    return max(32, 4 * num_devices)


def environment_of(num_devices: int) -> dict[str, str]:
    """Returns the environment variables of a process with emulated devices."""
    return {
        ENVIRONMENT_VARIABLE: str(num_devices),
        "JAX_PLATFORMS": "cpu",  # for programs that do not call tpudist.emulate
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "NPROC": str(num_threads(num_devices)),
    }


def devices_of_environment() -> int | None:
    """Returns the number of emulated devices in `TPUDIST_EMULATE`; None if it is not set.

    Raises:
        ValueError: If the value is not a positive number.
    """
    return _parse_num_devices(None) if os.environ.get(ENVIRONMENT_VARIABLE) else None


def _parse_num_devices(num_devices: int | None) -> int:
    origin = "tpudist.emulate"
    value: int | str | None = num_devices
    if value is None:
        origin, value = ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE, "8")
    try:
        # `operator.index` accepts NumPy's integers and rejects floats.
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(
            f"{origin} requests {shorten(value)} devices. The number must be an integer of at "
            "least 1, such as 8."
        )
    return number
