"""Compiled programs as bytes, to be compiled on one machine and run on another.

JAX pickles what it knows of a program around the compiler's own format. To read such bytes is to
run code of whoever wrote them: callers check who that was before.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable

from tpudist.xla.compiler import jax_cache


def compile_anew(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, Any]
) -> jax.stages.Compiled:
    """A compiled program for `to_bytes`, which JAX's persistent cache is not asked for.

    It keeps programs for described devices, and cannot load them again (jax 0.12).
    """
    with jax_cache.bypass():
        return lowered.compile(compiler_options=dict(compiler_options))


def to_bytes(compiled: jax.stages.Compiled) -> bytes:
    """A compiled program; also of one for devices that are not here.

    Raises:
        ValueError: It cannot leave this process: it calls back into Python, for one.
    """
    try:
        return serialize_executable.serialize(compiled)[0]
    except Exception as error:  # JAX's, pickle's or the compiler's: all mean the same
        raise ValueError(
            f"The compiled program cannot be saved: {error}. A callback into Python "
            "(jax.debug.print, io_callback) belongs to its process. Remove it."
        ) from error


class Ahead:
    """A function that was compiled before, and `jitted`, which compiles it for other shapes."""

    def __init__(self, compiled: jax.stages.Compiled, jitted: Any):
        """Both take the same arguments, and are nested alike."""
        self._compiled, self._jitted = compiled, jitted
        self.trace = jitted.trace

    def __call__(self, *args: Any) -> Any:
        """What either gives."""
        try:
            return self._compiled(*args)
        except (TypeError, ValueError):  # which JAX raises before it runs anything
            return self._jitted(*args)


def from_bytes(data: bytes, lowered: jax.stages.Lowered, devices: Any) -> jax.stages.Compiled:
    """The compiled program of `to_bytes`, ready to run. It runs what is in `data`: see the module.

    Args:
        data: What `to_bytes` gave.
        lowered: The same program, lowered here: how arguments and results are nested.
        devices: Those to run it on, in the order of the mesh.

    Raises:
        ValueError: It cannot be loaded on these devices.
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
    except Exception as error:  # pickle's, the compiler's: all mean the same
        raise ValueError(
            f"The saved program cannot be loaded on {len(devices)} x {devices[0].device_kind}: "
            f"{type(error).__name__}: {error}"
        ) from error
