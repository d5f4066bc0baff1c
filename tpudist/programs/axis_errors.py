"""What a replica function or a model asks of mesh axes that the mesh does not have, in words.

JAX raises while it traces, in terms of its own. Each of its texts is known here by one phrase; an
error without one goes on as it is.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from tpudist.programs import jaxprs, user_lines
from tpudist.xla.hlo.source_lines import line_of_error
from tpudist.xla.mesh import REPLICA_AXIS, ReplicaMesh

_UNBOUND = re.compile(r"unbound axis name: ([^\s.]+)")
_NO_SUCH_AXIS = re.compile(r"Resource axis: (\S+) of (.+?) is not found in mesh")
_NOT_EXPLICIT = re.compile(r"passed to (.+?) cannot contain axis names that are of type Auto or M")
_MANUAL = re.compile(r"with axis name: (\S+) of type: (?:AxisType\.)?Manual")
_NOT_AUTO = "can only refer to Auto axes of the mesh"
_SPEC = re.compile(r"(?:PartitionSpec: |spec=|pspec )(P(?:artitionSpec)?\(.*?\))(?: |\.|$)")


@contextlib.contextmanager
def explain_axes(mesh: ReplicaMesh, name: str) -> Iterator[None]:
    """Says what a function asked of mesh axes, where they are found in the block, and the remedy.

    Args:
        mesh: On which it is traced.
        name: What the user calls it.

    Raises:
        ValueError: It asked for an axis that is not there or that cannot be asked for.
        NameError: It names an axis in a collective that replicas do not have.
    """
    try:
        yield
    except NameError as error:
        if found := _UNBOUND.search(str(error)):
            who = f"'{name}' ({line_of_error(error)})"
            raise NameError(describe_unbound_axis(mesh, who, axis=found[1])) from error
        raise
    except ValueError as error:
        text = _explain(mesh, name, error)
        if text is None:
            raise
        raise ValueError(text) from error


def check_constraints(mesh: ReplicaMesh, closed: jaxprs.ClosedJaxpr, name: str) -> None:
    """Refuses constraints by the replica axis that JAX finds no earlier than when it lowers them.

    Those by a `NamedSharding` are; of those by a `PartitionSpec` it says so while it traces.

    Args:
        mesh: On which it was traced.
        closed: What was traced.
        name: What the user calls it.

    Raises:
        ValueError: A value of one replica is to be split over all of them.
    """
    for eqn in jaxprs.walk(closed):
        if eqn.primitive.name != "sharding_constraint":
            continue
        spec = getattr(eqn.params.get("sharding"), "spec", None) or ()
        parts = [part if isinstance(part, tuple) else (part,) for part in spec]
        axes = {axis for part in parts for axis in part}
        if axes & mesh.manual_axes:
            who = f"'{name}' ({user_lines.line_of(eqn) or 'an unknown line'})"
            raise ValueError(f"{who} constrains a value to {spec}. {_without(REPLICA_AXIS, mesh)}")


def describe_unbound_axis(mesh: ReplicaMesh, who: str, *, axis: str) -> str:
    """Returns why a collective cannot name an axis, and what to write instead.

    Args:
        mesh: The replicas.
        who: The function that names it, with its line.
        axis: The name.
    """
    if axis in mesh.inner_axes:
        return (
            f"{who} names the axis {axis!r} in a collective. That axis is inside a replica: each "
            "replica function sees whole arrays, and XLA splits the work. Remove the collective, "
            f"or write a jax.shard_map over {axis!r} in the function."
        )
    names = [REPLICA_AXIS] + ([mesh.axis_name] if mesh.axis_name else [])
    return (
        f"{who} names the axis {axis!r} in a collective, but the axis of the replicas is called "
        f"{' or '.join(map(repr, names))}. Use tpudist.get_replica_context().all_reduce (or "
        f"all_gather), name {REPLICA_AXIS!r}, or make the strategy with axis_name={axis!r}: "
        f"tpudist.MirroredStrategy(axis_name={axis!r})."
    )


def describe_missing_axis(mesh: Mesh, who: str, *, spec: Any, axis: str) -> str:
    """The refusal of a split by an axis that there is not, or by a name that no rule has.

    Args:
        mesh: Which axes there are.
        who: Asks for it.
        spec: What is asked for.
        axis: That is missing.
    """
    axes = ", ".join(map(repr, mesh.axis_names))
    return (
        f"{who} asks for {spec}, but the mesh has the axes {axes}, and no {axis!r}. Annotations of "
        "Linen's with_partitioning and sharding constraints name axes of the mesh. Give replicas "
        f"that axis, with TPUStrategy(replica_axes={{{axis!r}: ...}}), or annotate with logical "
        "names (nn.with_logical_partitioning, nnx.with_partitioning) that have a rule: "
        f"logical_axis_rules=(({axis!r}, None),) leaves this axis whole."
    )


def _explain(mesh: ReplicaMesh, name: str, error: ValueError) -> str | None:
    said = str(error)
    who = f"'{name}' ({line_of_error(error)})"
    if found := _NO_SUCH_AXIS.search(said):
        return describe_missing_axis(mesh.mesh, who, spec=found[2], axis=found[1])
    spec = found[1] if (found := _SPEC.search(said)) else "a split"
    if found := _NOT_EXPLICIT.search(said):
        asked = f"{who} asks {found[1]} for out_sharding={spec}"
        if manual := _MANUAL.search(said):
            return f"{asked}. {_without(manual[1], mesh)}"
        if re.search(rf"\b{REPLICA_AXIS}\b", spec):
            return f"{asked}. {_without(REPLICA_AXIS, mesh)}"
        return (
            f"{asked}, which JAX supports only on meshes with Explicit axes. The axes inside a "
            "replica are Auto; tpudist applies out_sharding to them only in functions that it "
            "knows. Remove it and split the result: jax.lax.with_sharding_constraint(x, spec). In "
            "a model's configuration set these shardings to None."
        )
    if _NOT_AUTO in said:
        return f"{who} constrains a value to {spec}. {_without(REPLICA_AXIS, mesh)}"
    return None


def _without(axis: str, mesh: ReplicaMesh) -> str:
    """Why a value cannot be split over an axis, and over which it can be."""
    if axis != REPLICA_AXIS:
        return f"In a shard_map over {axis!r} a value is not split over it. Remove that axis."
    inner = ", ".join(map(repr, mesh.inner_axes)) or "none"
    return (
        "A replica function sees the value of one replica, which is not split over "
        f"'{REPLICA_AXIS}'. Remove that axis. The axes inside a replica, which can split the "
        "value, are: "
        f"{inner}{' (a replica is one device)' if mesh.devices_per_replica == 1 else ''}."
    )
