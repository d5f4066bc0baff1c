"""Describes the devices of a TPU slice, to compile programs for it on any machine.

libtpu contains the complete TPU compiler, which runs without a TPU. A program for described devices
is the program that the slice would run, with the same collectives, FLOPs and memory. These devices
cannot run it.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from tpudist.xla import versions
from tpudist.xla.hardware import slices

# Only in the megacore configuration a v4 chip is one device, as on a real slice.
_OPTIONS: dict[str, dict[str, Any]] = {"v4": {"chip_config_name": "megacore"}}
# libtpu asks the machine for these values. On a machine without a TPU it would write warnings and
# an error to stderr. The values do not affect the program.
NO_TPU_HERE = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # libtpu locks the chip for one process. Several compiler processes may run at the same time.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def devices(name: str, *, num_slices: int | None = None) -> list[jax.Device]:
    """Returns described devices of the TPU slice `name`. This needs libtpu, but no TPU.

    Each call for a slice returns the same devices, so that arrays on two meshes of them can meet
    in one program. Sets environment variables of this process for libtpu, if it has no TPU.

    Args:
        name: Name of the slice: "v5e-256", "v5p-128", "2xv5e-256" (two slices) or, with the shape
            in chips, "v5e:2x4"; see `slices.parse`. A chip of v2, v3 or tpu7x is two devices, any
            other chip is one.
        num_slices: Number of slices, which the data-center network connects; by default from the
            name. With several slices, each device has a `slice_index`.

    Raises:
        ValueError: If the generation or the shape does not exist, or libtpu rejects it.
        ImportError: If libtpu is not installed, or is not the version for this jax.
    """
    tpu_slice = slices.parse(name)
    num_slices = tpu_slice.num_slices if num_slices is None else num_slices
    if not isinstance(num_slices, int) or num_slices < 1:
        raise ValueError(f"num_slices={num_slices!r}: it must be an integer of at least 1.")
    if tpu_slice.num_slices not in (1, num_slices):
        raise ValueError(
            f'"{name}" is {tpu_slice.num_slices} slices, but num_slices is {num_slices}. Omit one '
            "of them."
        )
    require_libtpu(name)
    # JAX sets this variable if it finds no TPU chip. A machine with chips has the real values.
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        for variable, value in NO_TPU_HERE.items():
            os.environ.setdefault(variable, value)
    options = dict(_OPTIONS.get(tpu_slice.generation, {}))
    if num_slices > 1:
        options["num_slices"] = num_slices
    shape = tpu_slice.shape
    if min(shape[:2]) < 2:  # libtpu's default is 2 x 2 chips per host
        options["chips_per_host_bounds"] = (min(2, shape[0]), min(2, shape[1]), 1)
    return list(_describe(tpu_slice.libtpu_name, tuple(options.items())))


@functools.cache
def _describe(libtpu_name: str, options: tuple[tuple[str, Any], ...]) -> tuple[jax.Device, ...]:
    arguments = {name: list(x) if isinstance(x, tuple) else x for name, x in options}
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=libtpu_name, **arguments
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f'libtpu has no TPU slice "{libtpu_name}": {error}') from error
    return tuple(described.devices)


def require_libtpu(name: str) -> None:
    """Checks that the TPU compiler is installed in the version for this jax.

    Args:
        name: Name of the slice that needs it, for the error.

    Raises:
        ImportError: If libtpu is not installed, or in another version. With a newer version, some
            programs cannot be printed and others do not compile.
    """
    if versions.users_libtpu() is not None:
        return  # the user has chosen it
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f'Compiling for "{name}" needs libtpu, the TPU compiler, which is not installed. It '
            f'runs on any x86-64 Linux machine: pip install "tpudist[aot]".'
        )
    required, installed = _libtpu_of_jax(), versions.version_of("libtpu")
    if required and installed and not f"{installed}.".startswith(required):
        raise ImportError(
            f'Compiling for "{name}" needs the libtpu that jax {jax.__version__} was built for, '
            f"{required}*, but {installed} is installed. With another version, some programs do "
            f'not compile or cannot be read: pip install "jax[tpu]=={jax.__version__}". (The '
            "environment variable TPU_LIBRARY_PATH selects your own libtpu.so, at your own risk.)"
        )


def _libtpu_of_jax() -> str:
    """Returns the prefix of the version that jax's extra "tpu" requires, such as "0.0.42."."""
    for requirement in importlib.metadata.requires("jax") or ():
        if match := re.match(r"libtpu\s*==\s*([\d.]+)(\*?)", requirement):
            return match[1] if match[2] else f"{match[1]}."
    return ""
