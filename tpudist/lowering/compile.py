"""Turns a function written for one replica into one program for all replicas.

`trace` calls the function once, with abstract values of one replica's shapes, and returns its
jaxpr. The proof of equal values (`replica_equality`) and the global program (`spread`) both read
that jaxpr, so the user's Python runs once per signature. `run` compiles the result.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh, PartitionSpec
from jax.typing import ArrayLike

from tpudist.lowering import logical_replicas, replica_keys
from tpudist.lowering.workarounds import (
    branch_layouts,
    callback_layouts,
    collective_layouts,
    convolution_layouts,
    fft_layouts,
    lookup_layouts,
    open_constraints,
)
from tpudist.programs import (
    axis_names,
    jaxprs,
    library_operations,
    out_shardings,
    replica_equality,
    result_shapes,
)
from tpudist.programs.jax_errors import axis_errors, value_errors
from tpudist.xla import collectives, internals
from tpudist.xla.compiler import phases
from tpudist.xla.compiler.phases import Phase
from tpudist.xla.mesh import ReplicaMesh
from tpudist.xla.ordered_sums import Block

# Larger constants are an error: they would be copied into the program, and a change of the array
# would have no effect on later calls.
MAX_CONSTANT_BYTES = 1 << 20
_NO_MESH = AbstractMesh((), ())

Arrays = Sequence[jax.Array | jax.ShapeDtypeStruct | np.ndarray]


@dataclasses.dataclass(frozen=True)
class ReplicaProgram:
    """The program of one replica.

    Attributes:
        closed: Jaxpr from local inputs to local outputs.
        stacked: Whether each input is a stacked array, so that a replica sees only its part.
    """

    closed: jaxprs.ClosedJaxpr
    stacked: tuple[bool, ...]


@phases.measure(Phase.TRACE)
def trace(
    function: Callable[..., Sequence[jax.Array]],
    mesh: ReplicaMesh,
    inputs: Sequence[jax.ShapeDtypeStruct],
    stacked: Sequence[bool],
    name: str = "a replica function",
) -> ReplicaProgram:
    """Calls `function` once, as one replica: axis names and meshes are real, values abstract.

    Args:
        function: Called with the local inputs; returns a flat list of local outputs.
        mesh: The replicas.
        inputs: Global shapes and dtypes; stacked ones have a leading replica dim.
        stacked: Whether each input is stacked.
        name: Name of the user's function, for errors.

    Raises:
        ValueError: If `function` captures an array of a mesh with Explicit axes.
        NameError: If a collective uses an axis that the mesh does not have.
    """
    if mesh.block is not None:
        local = [_shape_of_part(x, s) for x, s in zip(inputs, stacked, strict=True)]
        with axis_errors.explain_axes(mesh, name), value_errors.explain_values(name):
            return ReplicaProgram(_trace_one(function, mesh, local), tuple(stacked))
    traced: list[jaxprs.ClosedJaxpr] = []  # `eval_shape` returns only shapes; `body` fills this
    result_shapes.leave_out_manual_meshes()
    open_constraints.leave_out_open_constraints()

    def body(*values):
        # The inner trace runs inside the shard_map, because only there the axis has a name and the
        # values have the shapes of one replica. The shard_map's own result is not used: its jaxpr
        # would have global shapes, and `spread` builds the shard_map that is compiled.
        local = [_part(x) if s else x for x, s in zip(values, stacked, strict=True)]
        with (
            internals.leave_devices(),
            axis_names.name_replicas(mesh),
            out_shardings.apply_out_shardings(),
        ):
            closed = jax.make_jaxpr(function)(*local)
        traced.append(library_operations.expand(axis_names.use_replica_axis(mesh, closed)))

    replicas = jax.shard_map(
        body,
        mesh=mesh.mesh,
        in_specs=_specs(mesh, stacked),
        out_specs=PartitionSpec(),
        axis_names=mesh.manual_axes,
        check_vma=False,
    )
    with (
        _explain_explicit_axes(name),
        axis_errors.explain_axes(mesh, name),
        value_errors.explain_values(name),
    ):
        jax.eval_shape(replicas, *inputs)
    return ReplicaProgram(traced[0], tuple(stacked))


@contextlib.contextmanager
def _explain_explicit_axes(name: str) -> Iterator[None]:
    try:
        yield
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


def spread(
    program: ReplicaProgram,
    mesh: ReplicaMesh,
    stack_outputs: Sequence[bool],
    finish: Callable[[list[jax.Array]], list[jax.Array]] = list,
) -> Callable[..., list[jax.Array]]:
    """Returns the global function of a replica's program, to be called inside `jit`.

    Args:
        program: Program of one replica.
        mesh: The replicas.
        stack_outputs: Whether each output leaves as a stacked array `[num_replicas, ...]`. Every
            other output must be equal on all replicas (`replica_equality.prove`): JAX declares it
            replicated without a check, so devices would disagree unnoticed.
        finish: Called with the outputs of each replica; returns the final ones. It may communicate.
    """
    # The workarounds belong here and not in `trace`: the proof and the error messages should refer
    # to the operations that the user wrote.
    closed = _lower_around_bugs(program.closed, program.stacked, mesh)
    # Between the devices of one replica, XLA might split an array of keys.
    folds_at_once = mesh.devices_per_replica == 1 and mesh.block is None
    run_replica = replica_keys.evaluate(closed) if folds_at_once else core.jaxpr_as_fun(closed)
    return _spread(run_replica, program.stacked, mesh, stack_outputs, finish)


def _spread(
    run_replica: Callable[..., list[jax.Array]],
    stacked: Sequence[bool],
    mesh: ReplicaMesh,
    stack_outputs: Sequence[bool],
    finish: Callable[[list[jax.Array]], list[jax.Array]],
) -> Callable[..., list[jax.Array]]:
    """Does the same as `spread` for a function of one replica."""

    def body(*values):
        if mesh.block is not None:
            return body_of_block(mesh.block, *values)
        local = [_part(x) if s else x for x, s in zip(values, stacked, strict=True)]
        outputs = finish(run_replica(*local))
        return [x[None] if s else x for x, s in zip(outputs, stack_outputs, strict=True)]

    def body_of_block(block: Block, *values: jax.Array):
        # `finish` is part of this trace, since its collectives too need the parts of all replicas.
        shapes = [_shape_of_part(x, s) for x, s in zip(values, stacked, strict=True)]
        closed = _trace_one(lambda *local: finish(run_replica(*local)), mesh, shapes)
        outputs, varying = logical_replicas.evaluate(closed, block, values, stacked)
        return [
            _as_output(x, varies, s, block.size)
            for x, varies, s in zip(outputs, varying, stack_outputs, strict=True)
        ]

    return jax.shard_map(
        body,
        mesh=mesh.mesh,
        in_specs=_specs(mesh, stacked),
        out_specs=list(_specs(mesh, stack_outputs)),
        axis_names=mesh.manual_axes,
        # `replica_equality` has proven what JAX would check. JAX's check would also require users
        # to cast the carries of their loops, and turns gradients into sums over the replicas.
        check_vma=False,
    )


def change_outputs(
    program: ReplicaProgram,
    mesh: ReplicaMesh,
    change: Callable[[dict[int, jax.Array], dict[int, jax.Array]], Sequence[jax.Array]],
    inputs: Sequence[int],
    outputs: Sequence[int],
    name: str,
) -> ReplicaProgram:
    """Returns a program whose last operations are `change`, which replaces some outputs.

    Args:
        change: Called with the local values of `inputs` and of `outputs`, by their numbers;
            returns the new outputs, in the order of `outputs`.
    """
    # The operations of the program stay as they are: to trace them again would take much longer.
    first = program.closed.jaxpr
    atoms = [*(first.invars[i] for i in inputs), *(first.outvars[i] for i in outputs)]

    def run(*values: jax.Array) -> Sequence[jax.Array]:
        of_inputs = dict(zip(inputs, values, strict=False))
        return change(of_inputs, dict(zip(outputs, values[len(inputs) :], strict=True)))

    shapes = [
        jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type) for x in atoms
    ]
    added = trace(run, mesh, shapes, [False] * len(shapes), name).closed
    last = added.jaxpr
    atom_of: dict[Any, Any] = dict(zip(last.invars, atoms, strict=True))

    def map_atom(atom: Any) -> Any:
        return atom if jaxprs.is_literal(atom) else atom_of.get(atom, atom)

    outvars = list(first.outvars)
    for i, atom in zip(outputs, last.outvars, strict=True):
        outvars[i] = map_atom(atom)
    jaxpr = first.replace(
        constvars=[*first.constvars, *last.constvars],
        eqns=[
            *first.eqns,
            *(eqn.replace(invars=list(map(map_atom, eqn.invars))) for eqn in last.eqns),
        ],
        outvars=outvars,
        effects=first.effects | last.effects,
    )
    closed = jaxprs.ClosedJaxpr(jaxpr, [*program.closed.consts, *added.consts])
    return dataclasses.replace(program, closed=closed)


def evaluate(closed: jaxprs.ClosedJaxpr, values: Sequence[ArrayLike]) -> list[jax.Array]:
    """Returns the outputs of a jaxpr; inside a trace, its operations become part of that trace."""
    return core.jaxpr_as_fun(closed)(*values)


def last_outputs(
    program: ReplicaProgram, mesh: ReplicaMesh, count: int, values: Arrays
) -> list[jax.Array] | None:
    """Runs a program and returns its last `count` (at least 1) outputs, from the first replica.

    Returns None if these outputs depend on an input whose value is abstract.
    """
    assert count > 0

    def finish(outputs):
        return collectives.broadcast(list(outputs[-count:]))

    known = [not isinstance(x, jax.ShapeDtypeStruct) for x in values]
    if not all(known):
        depend = [None if k else "an abstract input" for k in known]
        causes = replica_equality.prove(program.closed, depend).causes
        if any(cause is not None for cause in causes[-count:]):
            return None
        # The outputs provably do not depend on the abstract inputs, so zeros will do.
        values = [
            x if k else np.zeros(x.shape, x.dtype) for x, k in zip(values, known, strict=True)
        ]
    # Constants are passed as inputs: `jit` rejects a captured array that spans other processes.
    jaxpr, consts = program.closed.jaxpr, program.closed.consts

    def run_replica(*values: jax.Array) -> list[jax.Array]:
        closed = jaxprs.ClosedJaxpr(jaxpr, list(values[: len(consts)]))
        closed = _lower_around_bugs(closed, program.stacked, mesh)
        return core.jaxpr_as_fun(closed)(*values[len(consts) :])

    stacked = (*[False] * len(consts), *program.stacked)
    run = _spread(run_replica, stacked, mesh, [False] * count, finish)
    return jax.jit(run)(*consts, *values)


def _lower_around_bugs(
    closed: jaxprs.ClosedJaxpr, stacked: Sequence[bool], mesh: ReplicaMesh
) -> jaxprs.ClosedJaxpr:
    # See `partitioner_bugs`. Branches come last, because a constraint that another rewrite adds may
    # be the end of a branch. The other rewrites are about different operations.
    closed = collective_layouts.lower_collectives(closed, mesh)
    closed = callback_layouts.lower_callbacks(closed)
    closed = convolution_layouts.lay_out_convolutions(closed)
    closed = fft_layouts.lay_out_transforms(closed)
    closed = lookup_layouts.lay_out_lookups(closed, stacked)
    return branch_layouts.lay_out_branches(closed)


def large_constants(program: ReplicaProgram) -> list[jax.Array | np.ndarray]:
    """Returns the constants above `MAX_CONSTANT_BYTES` of a program and of each `jit` in it."""
    return [
        x
        for x in jaxprs.constants_of(program.closed)
        # A constant may be any object with a rule in JAX, such as a Python number.
        if not isinstance(x, Tracer) and getattr(x, "nbytes", 0) > MAX_CONSTANT_BYTES
    ]


def constant_arrays(program: ReplicaProgram) -> list[jax.Array]:
    """Returns the constants of a program, and of each `jit` in it, that are `jax.Array`s."""
    return [
        x
        for x in jaxprs.constants_of(program.closed)
        if isinstance(x, jax.Array) and not isinstance(x, Tracer)
    ]


def shape_of(value: ArrayLike | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype that an array has in a program.

    The dtype of a NumPy float64 is float32, unless 64-bit numbers are enabled. JAX would convert
    it too, with a warning.
    """
    aval = value if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _trace_one(
    function: Callable[..., Sequence[jax.Array]],
    mesh: ReplicaMesh,
    local: Sequence[jax.ShapeDtypeStruct],
) -> jaxprs.ClosedJaxpr:
    """Traces one of several replicas that share a device."""
    # The replica axis is larger than the mesh here, so it is a name without a mesh.
    with (
        jax.sharding.use_abstract_mesh(_NO_MESH),
        internals.leave_devices(),
        internals.name_axis(mesh.replica_axis, mesh.num_replicas),
        axis_names.name_replicas(mesh),
        out_shardings.apply_out_shardings(),
    ):
        traced = jax.make_jaxpr(function)(*local)
        return library_operations.expand(axis_names.use_replica_axis(mesh, traced))


def _shape_of_part(x: jax.Array | jax.ShapeDtypeStruct, is_stacked: bool) -> jax.ShapeDtypeStruct:
    whole = shape_of(x)
    shape = whole.shape[1:] if is_stacked else whole.shape
    return jax.ShapeDtypeStruct(shape, whole.dtype, weak_type=whole.weak_type)


def _as_output(x: ArrayLike, varies: bool, is_stacked: bool, size: int) -> jax.Array:
    # A value that varies is `[size, ...]`, with one row per replica of the device. If the output
    # must be equal on all replicas, the first row stands for all.
    x = jnp.asarray(x)
    if is_stacked:
        return x if varies else jnp.broadcast_to(x, (size, *x.shape))
    return x[0] if varies else x


def _part(stacked: jax.Array) -> jax.Array:
    return jax.lax.squeeze(stacked, (0,))


def _specs(mesh: ReplicaMesh, stacked: Sequence[bool]) -> tuple[PartitionSpec, ...]:
    return tuple(PartitionSpec(mesh.replica_axis) if s else PartitionSpec() for s in stacked)
