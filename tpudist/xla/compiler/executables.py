"""Serializes compiled programs, to compile on one machine and run on another.

JAX pickles its data about a program together with the compiler's format. Loading such bytes can run
any code of their author, so callers must check the author first (`private_files`).
"""

from collections.abc import Iterable, Mapping

import jax
from jax.experimental import serialize_executable

from tpudist.array_types import PyTree
from tpudist.xla.compiler import jax_cache, lowered_program


def compile_uncached(
    lowered: jax.stages.Lowered,
    mesh: jax.sharding.Mesh,
    compiler_options: Mapping[str, bool | int | float | str],
) -> jax.stages.Compiled:
    """Compiles a program for `to_bytes`, without JAX's persistent cache.

    Raises:
        ValueError: If the program's devices and the devices of `mesh` differ.
    """
    devices = lowered_program.devices_of(lowered)
    if {*devices} != {*mesh.devices.flat}:
        raise ValueError(
            f"The program cannot be saved, because its mesh has {len(devices)} devices of this "
            f"machine, {devices[0].device_kind}. Make its mesh of tpudist.planner.devices."
        )
    # The cache stores programs for described devices, but cannot load them (jax 0.12).
    with jax_cache.bypass():
        return lowered.compile(compiler_options=dict(compiler_options))


def to_bytes(compiled: jax.stages.Compiled) -> bytes:
    """Serializes a compiled program, which may be for described devices.

    Raises:
        ValueError: If the program works only in this process, for example due to a callback.
    """
    try:
        return serialize_executable.serialize(compiled)[0]
    # JAX, pickle and the compiler raise many types, which all mean the same.
    except Exception as error:
        raise ValueError(
            f"The compiled program cannot be saved: {error}. A callback into Python "
            "(jax.debug.print, io_callback) belongs to its process. Remove it."
        ) from error


class Precompiled:
    """Calls a compiled program; for other shapes, calls `jitted`, which compiles them.

    Args:
        compiled: The compiled program.
        jitted: The same function under `jax.jit`.
    """

    def __init__(self, compiled: jax.stages.Compiled, jitted: "jax.stages.Wrapped | Precompiled"):
        self._compiled, self._jitted = compiled, jitted
        self.trace = jitted.trace

    def __call__(self, *args: PyTree) -> PyTree:
        """Runs the program for these arguments."""
        try:
            return self._compiled(*args)
        # JAX raises these for other shapes, before it runs anything, so donated arguments are
        # still valid. An error of a running program is a RuntimeError.
        except (TypeError, ValueError):
            return self._jitted(*args)


def from_bytes(
    data: bytes, lowered: jax.stages.Lowered, devices: Iterable[jax.Device]
) -> jax.stages.Compiled:
    """Loads a compiled program, ready to run. This runs code in `data`; see the module.

    Args:
        data: Result of `to_bytes`.
        lowered: The same program, lowered here, for the structure of arguments and results.
        devices: Devices that run the program, in the order of the mesh.

    Raises:
        ValueError: If the program cannot be loaded on these devices.
    """
    devices = list(devices)
    try:
        return serialize_executable.deserialize_and_load(
            data,
            jax.tree.structure(lowered.args_info),
            lowered.out_tree,
            backend=devices[0].client,
            execution_devices=devices,
        )
    # Pickle and the compiler raise many types, which all mean the same.
    except Exception as error:
        raise ValueError(
            f"The saved program cannot be loaded on {len(devices)} x {devices[0].device_kind}: "
            f"{type(error).__name__}: {error}"
        ) from error
