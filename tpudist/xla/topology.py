"""The devices of a TPU slice that is not there, to compile programs for it on any machine.

libtpu holds the whole TPU compiler and needs no TPU to run it. What is compiled for these devices
is what the slice would run: the same collectives, FLOPs and memory. Nothing can be run on them.
"""

import importlib.metadata
import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from tpudist.xla import versions
from tpudist.xla.hardware import slices

# A v4 chip is one device, as on a real slice, only in its megacore configuration.
_OPTIONS: dict[str, dict[str, Any]] = {"v4": {"chip_config_name": "megacore"}}
# What libtpu asks the machine about, for whoever has no TPU to answer. Without it, it writes
# warnings and an error to stderr; the values do not change the program.
NO_TPU_HERE = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # A chip serves one process at a time, for which libtpu takes a lock; a compiler serves many.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def devices(name: str, *, num_slices: int | None = None) -> list[jax.Device]:
    """The devices of the TPU slice `name`, to compile for; no TPU is needed, only libtpu.

    Args:
        name: A slice as `slices.parse` knows them: "v5e-256", "v5p-128", "2xv5e-256" (two slices)
            or, with the shape in chips, "v5e:2x4". A chip of v2, v3 or tpu7x is two devices, any
            other is one.
        num_slices: Number of such slices, connected by the data-center network, if the name does
            not say. If there are several, each device has a `slice_index`.

    Raises:
        ValueError: Not a generation or a shape that is known, or one that libtpu refuses.
        ImportError: libtpu is not installed, or not the one that this jax was built for.
    """
    asked = slices.parse(name)
    num_slices = asked.num_slices if num_slices is None else num_slices
    if not isinstance(num_slices, int) or num_slices < 1:
        raise ValueError(f"num_slices={num_slices!r}: it must be an integer of at least 1.")
    if num_slices != asked.num_slices != 1:
        raise ValueError(
            f'"{name}" is {asked.num_slices} slices, but num_slices is {num_slices}. Omit one of '
            "them."
        )
    require_libtpu(name)
    # JAX sets this when it finds no TPU chip. With chips, the machine speaks for itself.
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        for variable, value in NO_TPU_HERE.items():
            os.environ.setdefault(variable, value)
    options = dict(_OPTIONS.get(asked.generation, {}))
    if num_slices > 1:
        options["num_slices"] = num_slices
    shape = asked.shape
    if min(shape[:2]) < 2:  # libtpu takes hosts to have 2 x 2 chips unless told
        options["chips_per_host_bounds"] = [min(2, shape[0]), min(2, shape[1]), 1]
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=asked.raw, **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f'libtpu has no TPU slice "{asked.raw}": {error}') from error
    return list(described.devices)


def require_libtpu(name: str) -> None:
    """Checks that the TPU compiler is here, and is the one that this jax was built for.

    Args:
        name: What it is needed for: the name of a slice.

    Raises:
        ImportError: It is not installed, or another one is. With a newer one, some programs cannot
            be printed and others do not compile.
    """
    if versions.users_libtpu() is not None:
        return  # trusted
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f'Compiling for "{name}" needs libtpu, the TPU compiler, which is not installed. It '
            f'runs on any x86-64 Linux machine: pip install "tpudist[aot]".'
        )
    wanted, found = _libtpu_of_jax(), versions.version_of("libtpu")
    if wanted and found and not f"{found}.".startswith(wanted):
        raise ImportError(
            f'Compiling for "{name}" needs the libtpu that jax {jax.__version__} was built for, '
            f"{wanted}*, but {found} is installed. With another version, some programs do not "
            f'compile or cannot be read: pip install "jax[tpu]=={jax.__version__}". (The '
            "environment variable TPU_LIBRARY_PATH selects your own libtpu.so, at your own risk.)"
        )


def _libtpu_of_jax() -> str:
    """The start of the version of libtpu that jax's extra "tpu" asks for, such as "0.0.42."."""
    for requirement in importlib.metadata.requires("jax") or ():
        if match := re.match(r"libtpu\s*==\s*([\d.]+)(\*?)", requirement):
            return match[1] if match[2] else f"{match[1]}."
    return ""
