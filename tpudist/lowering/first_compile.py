"""Compiles a program in another process first, where XLA might end the one that compiles it.

XLA's partitioner has checks that end the process, and a notebook with it. What `known_operations`
lists has been tried in replicas of several devices, on the jaxlibs that it names. A program with
anything else, or for another jaxlib, is compiled for emulated devices in a process of its own
before it is compiled in this one: if that process ends, the error says so, and why.
"""

import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from tpudist.lowering.workarounds import known_operations
from tpudist.programs import jaxprs, replica_equality
from tpudist.xla import versions
from tpudist.xla.compiler import compiler_process
from tpudist.xla.compiler.compiler_process import CompilerDied
from tpudist.xla.mesh import ReplicaMesh

_log = logging.getLogger("tpudist.compile")
_MOST_DOUBTS = 5
_INSTALLED = {"site-packages", "dist-packages"}


def find_doubts(closed: jaxprs.ClosedJaxpr, mesh: ReplicaMesh) -> list[str]:
    """Why a replica's program might end the process that compiles it, for people; may be empty.

    For replicas of emulated devices only: no other process can compile for a GPU or a TPU that this
    one holds, or an operation that XLA partitions by a call into this one.
    """
    if mesh.devices_per_replica == 1 or mesh.platform != "cpu":
        return []
    operations = set(_walk_with_lines(closed, ""))
    if known_operations.COMPILED_HERE.intersection(name for name, _ in operations):
        return []
    jaxlib = versions.version_of("jaxlib")
    if jaxlib not in known_operations.JAXLIBS:
        known = " and ".join(known_operations.JAXLIBS)
        return [f"jaxlib is {jaxlib}, but operations were tested with {known}"]
    return sorted(
        f"{name}{f' (at {where})' if where else ''} was not tested"
        for name, where in operations
        if name not in known_operations.KNOWN
    )


def _walk_with_lines(jaxpr: Any, called_at: str) -> Iterator[tuple[str, str]]:
    """The operations that XLA partitions, at all depths, each with the innermost line of a user's.

    What JAX has traced before, such as `jnp.sort`, has none of its own.
    """
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        line = replica_equality.line_of(eqn)
        where = called_at if _INSTALLED.intersection(pathlib.Path(line).parts) else line
        with eqn.ctx.manager:
            if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types:
                yield eqn.primitive.name, where or line
        for inner in jaxprs.programs_of(tuple(eqn.params.values())):
            yield from _walk_with_lines(inner, where or line)


def try_program(
    closed: jaxprs.ClosedJaxpr, mesh: ReplicaMesh, jitted: Any, arguments: Sequence[Any], name: str
) -> None:
    """Compiles a program in another process, if there are doubts about it.

    Args:
        closed: What a replica computes.
        mesh: Of the replicas.
        jitted: The program of all of them.
        arguments: What it will be called with.
        name: What the user calls the function.

    Raises:
        CompilerDied: XLA ended that process, as it would have ended this one.
    """
    doubts = find_doubts(closed, mesh)
    if not doubts:
        return
    lowered = jitted.trace(*arguments).lower()
    _log.info("compiling '%s' in another process first: %s", name, "; ".join(doubts))
    try:
        compiler_process.try_elsewhere(lowered, mesh.mesh.size)
    except CompilerDied as error:
        listed = "".join(f"\n- {doubt}" for doubt in doubts[:_MOST_DOUBTS])
        if len(doubts) > _MOST_DOUBTS:
            listed += f"\n- and {len(doubts) - _MOST_DOUBTS} more"
        axes = ", ".join(f"{axis}={mesh.mesh.shape[axis]}" for axis in mesh.inner_axes)
        raise CompilerDied(
            f"XLA ends the process that compiles '{name}' for replicas of several devices "
            f"({axes}). tpudist compiled it in another process first, because these operations are "
            f"not known to compile there:{listed}\n{error}\nThe rule: docs/constructs.md. Write "
            "these operations in another way; or use fewer axes per replica, or one device "
            "(MirroredStrategy), where nothing is partitioned."
        ) from None
