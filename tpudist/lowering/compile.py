"""From a function written for one replica to one program for all of them.

`trace` calls the function once, abstractly, as one replica would see it, and gives its jaxpr. The
proof of what is equal (`replica_equality`) and the compiled program (`spread`) both read that
jaxpr, so the user's Python runs once per signature.

Every compile is recorded with its cause; see `tpudist.compile_log`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh, PartitionSpec

from tpudist.lowering import logical_replicas
from tpudist.lowering.workarounds import (
    branch_layouts,
    callback_layouts,
    collective_layouts,
    convolution_layouts,
    fft_layouts,
    lookup_layouts,
)
from tpudist.programs import (
    axis_errors,
    axis_names,
    jaxprs,
    library_operations,
    out_shardings,
    replica_equality,
    result_shapes,
    value_errors,
)
from tpudist.xla import collectives, internals
from tpudist.xla.mesh import ReplicaMesh

# Constants above this are refused: they would be copied into the program and never change again.
MAX_CONSTANT_BYTES = 1 << 20
_NO_MESH = AbstractMesh((), ())


@dataclasses.dataclass(frozen=True)
class ReplicaProgram:
    """The program of one replica.

    Attributes:
        closed: Its jaxpr: local inputs to local outputs.
        stacked: For each input, whether it is a stacked array, of which a replica sees its part.
    """

    closed: jaxprs.ClosedJaxpr
    stacked: tuple[bool, ...]


def trace(
    function: Callable[..., Sequence[jax.Array]],
    mesh: ReplicaMesh,
    inputs: Sequence[jax.ShapeDtypeStruct],
    stacked: Sequence[bool],
    name: str = "a replica function",
) -> ReplicaProgram:
    """Calls `function` once, as one replica: axis names and meshes are real, values abstract.

    Args:
        function: Takes the local inputs, gives a flat list of local outputs.
        mesh: The replicas.
        inputs: Global shapes and dtypes; stacked ones have a leading replica dim.
        stacked: Which inputs are stacked.
        name: What the user calls the function, for errors.

    Raises:
        ValueError: It captures an array of a mesh with Explicit axes.
        NameError: It names an axis in a collective that replicas do not have.
    """
    if mesh.block is not None:
        local = [_shape_of_part(x, s) for x, s in zip(inputs, stacked, strict=True)]
        with axis_errors.explain_axes(mesh, name), value_errors.explain_values(name):
            return ReplicaProgram(_trace_one(function, mesh, local), tuple(stacked))
    found = []
    result_shapes.leave_out_manual_meshes()

    def body(*values):
        # Traced within the shard_map, where the axis has its name and values the shapes of one
        # replica; what the shard_map itself would give is not asked for.
        local = [_part(x) if s else x for x, s in zip(values, stacked, strict=True)]
        with (
            internals.leave_devices(),
            axis_names.name_replicas(mesh),
            out_shardings.honour_out_shardings(),
        ):
            traced = jax.make_jaxpr(function)(*local)
        found.append(library_operations.expand(axis_names.use_replica_axis(mesh, traced)))

    replicas = jax.shard_map(
        body,
        mesh=mesh.mesh,
        in_specs=_specs(mesh, stacked),
        out_specs=PartitionSpec(),
        axis_names=mesh.manual_axes,
        check_vma=False,
    )
    try:
        with axis_errors.explain_axes(mesh, name), value_errors.explain_values(name):
            jax.eval_shape(replicas, *inputs)
    except NotImplementedError as error:
        if "sharded on `Explicit` axes" not in str(error):
            raise
        captured = str(error).rpartition("with shape ")[2]
        raise ValueError(
            f"'{name}' captures an array of a mesh with Explicit axes, {captured}. Such an array "
            "belongs to that mesh, but replicas run on another mesh. Pass it as an argument of "
            f"'{name}', which is moved; or make the mesh with "
            "axis_types=(jax.sharding.AxisType.Auto,) for each of its axes."
        ) from error
    return ReplicaProgram(found[0], tuple(stacked))


def spread(
    program: ReplicaProgram,
    mesh: ReplicaMesh,
    stack_outputs: Sequence[bool],
    finish: Callable[[list[jax.Array]], list[jax.Array]] = list,
) -> Callable[..., list[jax.Array]]:
    """The global function of a replica's program, to be called inside `jit`.

    Args:
        program: What each replica does.
        mesh: The replicas.
        stack_outputs: Which outputs leave as stacked arrays `[num_replicas, ...]`. The others must
            be equal on every replica (`replica_equality.prove`), or the arrays would claim what is
            not so.
        finish: What each replica does to its outputs at the end; it may communicate.
    """
    closed = program.closed
    if callable(closed):
        evaluate: Any = closed
    else:
        # Here and not in `trace`: what is proven and what people read is their own program.
        evaluate = core.jaxpr_as_fun(_as_xla_takes_it(closed, program.stacked, mesh))

    def body(*values):
        if mesh.block is not None:
            return body_of_several(mesh.block, *values)
        local = [_part(x) if s else x for x, s in zip(values, program.stacked, strict=True)]
        outputs = finish(evaluate(*local))
        return [x[None] if s else x for x, s in zip(outputs, stack_outputs, strict=True)]

    def body_of_several(block, *values):
        shapes = [_shape_of_part(x, s) for x, s in zip(values, program.stacked, strict=True)]
        one = _trace_one(lambda *local: finish(evaluate(*local)), mesh, shapes)
        outputs, varying = logical_replicas.evaluate(one, block, values, program.stacked)
        return [
            _as_output(x, varies, s, block.size)
            for x, varies, s in zip(outputs, varying, stack_outputs, strict=True)
        ]

    return jax.shard_map(
        body,
        mesh=mesh.mesh,
        in_specs=_specs(mesh, program.stacked),
        out_specs=list(_specs(mesh, stack_outputs)),
        axis_names=mesh.manual_axes,
        # `replica_equality` has proven what JAX would check, which asks for casts in users' loops.
        check_vma=False,
    )


def evaluate(closed: jaxprs.ClosedJaxpr, values: Sequence[Any]) -> list[jax.Array]:
    """The outputs of a jaxpr, as a part of the trace that is under way."""
    return core.jaxpr_as_fun(closed)(*values)


def last_outputs(
    program: ReplicaProgram, mesh: ReplicaMesh, count: int, values: Sequence[Any]
) -> list[jax.Array] | None:
    """Runs a program for its last `count` outputs, as the first replica computes them.

    Inputs may be abstract if these do not depend on them; otherwise the answer is None.
    """

    def finish(outputs):
        return collectives.broadcast(list(outputs[-count:]))

    known = [not isinstance(x, jax.ShapeDtypeStruct) for x in values]
    if not all(known):
        depend = [None if k else "an abstract input" for k in known]
        causes = replica_equality.prove(program.closed, depend).causes
        if any(cause is not None for cause in causes[-count:]):
            return None
        # Proven not to matter, so they may be anything.
        values = [x if k else np.zeros(x.shape, x.dtype) for x, k in zip(values, known)]  # noqa: B905
    # Arrays that are captured may be those of other processes too: they are inputs here.
    consts = program.closed.consts
    run = spread(_with_consts_first(program, mesh), mesh, [False] * count, finish)
    return jax.jit(run)(*consts, *values)


def _with_consts_first(program: ReplicaProgram, mesh: ReplicaMesh) -> ReplicaProgram:
    jaxpr, consts = program.closed.jaxpr, program.closed.consts

    def evaluate(*values):
        closed = jaxprs.ClosedJaxpr(jaxpr, list(values[: len(consts)]))
        closed = _as_xla_takes_it(closed, program.stacked, mesh)
        return core.jaxpr_as_fun(closed)(*values[len(consts) :])

    return ReplicaProgram(evaluate, (*[False] * len(consts), *program.stacked))  # type: ignore


def _as_xla_takes_it(
    closed: jaxprs.ClosedJaxpr, stacked: Sequence[bool], mesh: ReplicaMesh
) -> jaxprs.ClosedJaxpr:
    """The same program, lowered around what JAX and XLA do not take; see `partitioner_bugs`."""
    closed = collective_layouts.lower_collectives(closed, mesh)
    closed = callback_layouts.lower_callbacks(closed)
    closed = convolution_layouts.lay_out_convolutions(closed)
    closed = fft_layouts.lay_out_transforms(closed)
    closed = lookup_layouts.lay_out_lookups(closed, stacked)
    return branch_layouts.lay_out_branches(closed)


def large_constants(program: ReplicaProgram) -> list[jax.Array | np.ndarray]:
    """The arrays above `MAX_CONSTANT_BYTES` that a program, or a jit in it, has as constants."""
    return [
        x
        for x in jaxprs.constants_of(program.closed)
        if not isinstance(x, Tracer) and getattr(x, "nbytes", 0) > MAX_CONSTANT_BYTES
    ]


def constant_arrays(program: ReplicaProgram) -> list[jax.Array]:
    """The `jax.Array`s that a program, or a jit in it, has as constants."""
    return [
        x
        for x in jaxprs.constants_of(program.closed)
        if isinstance(x, jax.Array) and not isinstance(x, Tracer)
    ]


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype that an array has in a program: a float64 of NumPy's is a float32 there.

    Unless 64-bit numbers are enabled. JAX itself would do the same with a warning.
    """
    aval: Any = value if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value)
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def _trace_one(
    function: Callable[..., Any], mesh: ReplicaMesh, local: Sequence[jax.ShapeDtypeStruct]
) -> jaxprs.ClosedJaxpr:
    """The program of one of several replicas that share devices: they have an axis, and no mesh."""
    with (
        jax.sharding.use_abstract_mesh(_NO_MESH),
        internals.leave_devices(),
        internals.name_axis(mesh.replica_axis, mesh.num_replicas),
        axis_names.name_replicas(mesh),
        out_shardings.honour_out_shardings(),
    ):
        traced = jax.make_jaxpr(function)(*local)
        return library_operations.expand(axis_names.use_replica_axis(mesh, traced))


def _shape_of_part(x: Any, is_stacked: bool) -> jax.ShapeDtypeStruct:
    whole = shape_of(x)
    shape = whole.shape[1:] if is_stacked else whole.shape
    return jax.ShapeDtypeStruct(shape, whole.dtype, weak_type=whole.weak_type)


def _as_output(x: Any, varies: bool, is_stacked: bool, size: int) -> jax.Array:
    """A result as it leaves a device: each replica's, or one that is equal on all."""
    if is_stacked:
        return x if varies else jnp.broadcast_to(x, (size, *jnp.shape(x)))
    return x[0] if varies else jnp.asarray(x)


def _part(stacked: jax.Array) -> jax.Array:
    return jax.lax.squeeze(stacked, (0,))


def _specs(mesh: ReplicaMesh, stacked: Sequence[bool]) -> tuple[PartitionSpec, ...]:
    return tuple(PartitionSpec(mesh.replica_axis) if s else PartitionSpec() for s in stacked)
