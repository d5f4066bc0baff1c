"""Compiles a program in another process first if XLA might end the process that compiles it.

XLA's partitioner has checks that end the process, including a notebook. `known_operations` lists
the operations that were tested in replicas of several devices, and the tested jaxlibs. A program
with another operation, or on another jaxlib, is first compiled for emulated devices in a separate
process. If that process ends, this one raises `CompilerDied` with the cause. Otherwise its
operations are known from then on, so a program of the same operations is compiled only here.
"""

import logging
import pathlib
from collections.abc import Iterator, Sequence

import jax
from jax import stages
from jax.extend import core
from jax.sharding import AxisType

from tpudist.array_types import PyTree
from tpudist.lowering.workarounds import known_operations
from tpudist.programs import jaxprs, replica_equality
from tpudist.xla import versions
from tpudist.xla.compiler import compiler_process
from tpudist.xla.compiler.compiler_process import CompilerDied
from tpudist.xla.mesh import ReplicaMesh

_log = logging.getLogger("tpudist.compile")
_MAX_LISTED_DOUBTS = 5  # in the error message
_INSTALLED = {"site-packages", "dist-packages"}
# By the axes of the mesh, the operations of the programs that another process has compiled. What
# XLA does depends on its version too, but a process has only one.
_compiled: dict[tuple[tuple[str, int], ...], set[str]] = {}


def find_doubts(closed: jaxprs.ClosedJaxpr, mesh: ReplicaMesh) -> list[str]:
    """Returns the reasons why compiling a replica's program might end the process, as texts."""
    # Nothing is partitioned in a replica of one device. A GPU or TPU belongs to this process, so
    # no other process could compile for it.
    if mesh.devices_per_replica == 1 or mesh.platform != "cpu":
        return []
    operations = set(_walk_with_lines(closed, ""))
    # XLA partitions these by a call into this process, which does not work in another one.
    if known_operations.COMPILED_HERE.intersection(name for name, _ in operations):
        return []
    compiled = _compiled.get(_axes_of(mesh), set())
    if all(name in compiled for name, _ in operations):
        return []
    jaxlib = versions.version_of("jaxlib")
    if jaxlib not in known_operations.JAXLIBS:
        known = " and ".join(known_operations.JAXLIBS)
        return [f"jaxlib is {jaxlib}, but operations were tested with {known}"]
    return sorted(
        f"{name}{f' (at {where})' if where else ''} was not tested"
        for name, where in operations
        if name not in known_operations.KNOWN | compiled
    )


def _axes_of(mesh: ReplicaMesh) -> tuple[tuple[str, int], ...]:
    return tuple(mesh.mesh.shape.items())


def _walk_with_lines(
    jaxpr: core.Jaxpr | jaxprs.ClosedJaxpr, called_at: str
) -> Iterator[tuple[str, str]]:
    """Yields each operation that XLA partitions, at all depths, with the user's innermost line."""
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        # The line of an operation inside a library call, such as `jnp.sort`, is in the library, or
        # is missing if JAX traced the call before. Then the line of the call is used.
        line = replica_equality.line_of(eqn)
        user_line = called_at if _INSTALLED.intersection(pathlib.Path(line).parts) else line
        with eqn.ctx.manager:
            if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types:
                yield eqn.primitive.name, user_line or line
        for inner in jaxprs.programs_of(eqn.params.values()):
            yield from _walk_with_lines(inner, user_line or line)


def try_program(
    closed: jaxprs.ClosedJaxpr,
    mesh: ReplicaMesh,
    jitted: stages.Wrapped,
    arguments: Sequence[PyTree],
    name: str,
) -> None:
    """Compiles a program in another process if `find_doubts` returns any.

    Args:
        closed: Program of one replica.
        mesh: The replicas.
        jitted: Program of all replicas.
        arguments: Arguments of the first call of `jitted`.
        name: Name of the user's function.

    Raises:
        CompilerDied: If XLA ended that process; it would have ended this one, too.
    """
    doubts = find_doubts(closed, mesh)
    if not doubts:
        return
    lowered = jitted.trace(*arguments).lower()
    _log.info("compiling '%s' in another process first: %s", name, "; ".join(doubts))
    try:
        is_compiled = compiler_process.try_elsewhere(lowered, mesh.mesh.size)
    except CompilerDied as error:
        listed = "".join(f"\n- {doubt}" for doubt in doubts[:_MAX_LISTED_DOUBTS])
        if len(doubts) > _MAX_LISTED_DOUBTS:
            listed += f"\n- and {len(doubts) - _MAX_LISTED_DOUBTS} more"
        axes = ", ".join(f"{axis}={mesh.mesh.shape[axis]}" for axis in mesh.inner_axes)
        raise CompilerDied(
            f"XLA ends the process that compiles '{name}' for replicas of several devices "
            f"({axes}). tpudist compiled it in another process first, because these operations are "
            f"not known to compile there:{listed}\n{error}\nThe rule: docs/constructs.md. Write "
            "these operations in another way; or use fewer axes per replica, or one device "
            "(MirroredStrategy), where nothing is partitioned."
        ) from None
    if is_compiled:
        compiled = _compiled.setdefault(_axes_of(mesh), set())
        compiled.update(name for name, _ in _walk_with_lines(closed, ""))
