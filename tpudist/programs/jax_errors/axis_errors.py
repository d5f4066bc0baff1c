"""Explains JAX's errors about mesh axes that a replica function or a model names.

JAX raises them while it traces, in its own terms. A phrase identifies each of JAX's texts; all
other errors pass unchanged.
"""

import contextlib
import re
from collections.abc import Iterator

from jax.sharding import Mesh, NamedSharding

from tpudist.programs import jaxprs, user_lines
from tpudist.xla.mesh import REPLICA_AXIS, ReplicaMesh
from tpudist.xla.user_code import line_of_error

# JAX's texts, the same in jax 0.10 and 0.12:
# "Found an unbound axis name: batch. To fix this, please call psum under `jax.shard_map`."
_UNBOUND = re.compile(r"unbound axis name: ([^\s.]+)")
# "Resource axis: model of P('model',) is not found in mesh: ('replica',)."
_NO_SUCH_AXIS = re.compile(r"Resource axis: (\S+) of (.+?) is not found in mesh")
# "PartitionSpec passed to einsum cannot contain axis names that are of type Auto or Manual. Got
# PartitionSpec: P('replica',) with axis name: replica of type: AxisType.Manual." ("M" suffices.)
_NOT_EXPLICIT = re.compile(
    r"passed to (.+?) cannot contain axis names that are of type Auto or Manual"
)
_MANUAL = re.compile(r"with axis name: (\S+) of type: (?:AxisType\.)?Manual")
# "The spec of NamedSharding passed to with_sharding_constraint can only refer to Auto axes of the
# mesh. Got spec=P('replica',) and mesh=..."
_NOT_AUTO = "can only refer to Auto axes of the mesh"
_SPEC = re.compile(r"(?:PartitionSpec: |spec=|pspec )(P(?:artitionSpec)?\(.*?\))(?: |\.|$)")


@contextlib.contextmanager
def explain_axes(mesh: ReplicaMesh, name: str) -> Iterator[None]:
    """Explains errors about mesh axes in the block, with the line and the remedy.

    Args:
        mesh: The mesh of the trace.
        name: Name of the traced function.

    Raises:
        ValueError: If the function requests an axis that is missing or that it cannot use.
        NameError: If a collective names an axis that replicas do not have.
    """
    try:
        yield
    except NameError as error:
        if match := _UNBOUND.search(str(error)):
            subject = f"'{name}' ({line_of_error(error)})"
            raise NameError(describe_unbound_axis(mesh, subject, axis=match[1])) from error
        raise
    except ValueError as error:
        text = _explain(mesh, name, error)
        if text is None:
            raise
        raise ValueError(text) from error


def check_constraints(mesh: ReplicaMesh, closed: jaxprs.ClosedJaxpr, name: str) -> None:
    """Rejects sharding constraints that split a value of one replica over all replicas.

    JAX rejects a `PartitionSpec` of that kind while it traces, but a `NamedSharding` only when it
    lowers the program.

    Args:
        mesh: The mesh of the trace.
        closed: The traced program.
        name: Name of the traced function.

    Raises:
        ValueError: If there is such a constraint.
    """
    for eqn in jaxprs.walk(closed):
        if eqn.primitive.name != "sharding_constraint":
            continue
        sharding = eqn.params.get("sharding")
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        parts = [part if isinstance(part, tuple) else (part,) for part in spec]
        axes = {axis for part in parts for axis in part}
        if axes & mesh.manual_axes:
            subject = f"'{name}' ({user_lines.line_of(eqn) or 'an unknown line'})"
            raise ValueError(
                f"{subject} constrains a value to {spec}. {_advise(REPLICA_AXIS, mesh)}"
            )


def describe_unbound_axis(mesh: ReplicaMesh, subject: str, *, axis: str) -> str:
    """Explains why a collective cannot name an axis, and what to write instead.

    Args:
        mesh: The mesh.
        subject: The function that names the axis, with its line.
        axis: The name.
    """
    if axis in mesh.inner_axes:
        return (
            f"{subject} names the axis {axis!r} in a collective. That axis is inside a replica: "
            "each replica function sees whole arrays, and XLA splits the work. Remove the "
            f"collective, or write a jax.shard_map over {axis!r} in the function."
        )
    names = [REPLICA_AXIS] + ([mesh.axis_name] if mesh.axis_name else [])
    return (
        f"{subject} names the axis {axis!r} in a collective, but the axis of the replicas is "
        f"called {' or '.join(map(repr, names))}. Use tpudist.get_replica_context().all_reduce (or "
        f"all_gather), name {REPLICA_AXIS!r}, or make the strategy with axis_name={axis!r}: "
        f"tpudist.MirroredStrategy(axis_name={axis!r})."
    )


def describe_missing_axis(mesh: Mesh, subject: str, *, spec: object, axis: str) -> str:
    """Explains that a split names an axis that the mesh lacks, or a name without a rule.

    Args:
        mesh: The mesh.
        subject: The function or variable that requests the split.
        spec: The requested split.
        axis: The missing axis.
    """
    axes = ", ".join(map(repr, mesh.axis_names))
    return (
        f"{subject} asks for {spec}, but the mesh has the axes {axes}, and no {axis!r}. "
        "Annotations of Linen's with_partitioning and sharding constraints name axes of the mesh. "
        f"Give replicas that axis, with TPUStrategy(replica_axes={{{axis!r}: ...}}), or annotate "
        "with logical names (nn.with_logical_partitioning, nnx.with_partitioning) that have a "
        f"rule: logical_axis_rules=(({axis!r}, None),) leaves this axis whole."
    )


def _explain(mesh: ReplicaMesh, name: str, error: ValueError) -> str | None:
    text = str(error)
    subject = f"'{name}' ({line_of_error(error)})"
    if match := _NO_SUCH_AXIS.search(text):
        return describe_missing_axis(mesh.mesh, subject, spec=match[2], axis=match[1])
    spec = match[1] if (match := _SPEC.search(text)) else "a split"
    if match := _NOT_EXPLICIT.search(text):
        request = f"{subject} asks {match[1]} for out_sharding={spec}"
        if manual := _MANUAL.search(text):
            return f"{request}. {_advise(manual[1], mesh)}"
        if re.search(rf"\b{REPLICA_AXIS}\b", spec):
            return f"{request}. {_advise(REPLICA_AXIS, mesh)}"
        return (
            f"{request}, which JAX supports only on meshes with Explicit axes. The axes inside a "
            "replica are Auto; tpudist applies out_sharding to them only in functions that it "
            "knows. Remove it and split the result: jax.lax.with_sharding_constraint(x, spec). In "
            "a model's configuration set these shardings to None."
        )
    if _NOT_AUTO in text:
        return f"{subject} constrains a value to {spec}. {_advise(REPLICA_AXIS, mesh)}"
    return None


def _advise(axis: str, mesh: ReplicaMesh) -> str:
    """Explains why a value cannot be split over an axis, and names the axes that can split it."""
    if axis != REPLICA_AXIS:
        return f"In a shard_map over {axis!r} a value is not split over it. Remove that axis."
    inner = ", ".join(map(repr, mesh.inner_axes)) or "none"
    return (
        "A replica function sees the value of one replica, which is not split over "
        f"'{REPLICA_AXIS}'. Remove that axis. The axes inside a replica, which can split the "
        "value, are: "
        f"{inner}{' (a replica is one device)' if mesh.devices_per_replica == 1 else ''}."
    )
