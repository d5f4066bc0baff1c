"""`planner.plan`: the plan of a step that knows nothing of tpudist.

The step is a function of `jax.jit`, `shard_map`, `pmap`, Equinox's `filter_jit` or `nnx.jit`, or a
program that was lowered already. It is lowered for descriptions of devices, and planned like a step
of a strategy.
"""

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from tpudist.array_types import PyTree, Shape
from tpudist.planner import figure_checks, input_roles, plan_builder
from tpudist.planner.calibration import Calibration, read_calibration
from tpudist.planner.plan_record import Plan
from tpudist.planner.show.progress import Progress, show_progress
from tpudist.programs import jaxprs
from tpudist.run.arguments import call_description
from tpudist.xla import descriptions, topology as topologies
from tpudist.xla.array_attributes import is_weakly_typed, sharding_of
from tpudist.xla.compiler import compiler_process, lowered_program
from tpudist.xla.estimate.memory import InputLeaf
from tpudist.xla.hardware import slices
from tpudist.xla.mesh import arrange_slices

Step = Callable[..., Any] | jax.stages.Lowered
# A mesh, or the sizes of its axes.
MeshLike = Mesh | Mapping[str, int]
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
_JITTED = type(jax.jit(lambda: None))  # JAX does not name the class
_DEVICES_RULE = (
    "The program is compiled for the devices of its shardings. Make its mesh of "
    'tpudist.planner.devices("v5e-8"), and lower the step for arguments on that mesh; or pass '
    "arguments without shardings, and in_shardings."
)
# What to do about errors of JAX.
_RULES = {
    "incompatible devices": _DEVICES_RULE,
    "does not match the sharding on the respective arg": "Pass the same in_shardings to plan().",
}


class _AbstractArray(jax.ShapeDtypeStruct):
    """An array without data that looks like an array.

    Equinox's `filter_jit` and others find the arrays among the arguments by `isinstance`.
    """

    __class__ = property(lambda self: jax.Array)  # pyright: ignore[reportIncompatibleMethodOverride]


def plan(
    step: Step,
    *args: PyTree,
    kwargs: Mapping[str, PyTree] | None = None,
    topology: str | None = None,
    mesh: MeshLike | None = None,
    in_shardings: PyTree = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    tokens_per_step: int | None = None,
    model_flops: float | None = None,
    cache: bool | str | Path = True,
    in_process: bool = False,
    calibration: str | Path | Mapping[str, Any] | Calibration | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Compiles a step of plain JAX, and returns its memory, time and traffic; nothing is run.

    The devices are those of the shardings of the step or of its arguments; such a mesh can be made
    of `planner.devices`. Without shardings, a step uses one device.

    Args:
        step: A function, which is jitted here; a function of `jax.jit`, `jax.pmap`,
            `equinox.filter_jit` or `nnx.jit`; or a `jax.stages.Lowered`.
        args: Arguments of the step. Arrays may be `jax.ShapeDtypeStruct`s; data are not read.
        kwargs: Keyword arguments of the step.
        topology: Slice, such as "v5e-8" or "2xv5e-256". Arrays on a mesh of other devices are
            moved to a mesh of the same axes. Default: the devices of the shardings.
        mesh: Mesh for `in_shardings`, which is also in force while the step is traced; or sizes of
            its axes, such as {"data": 4, "model": 2}, on the devices of `topology`. The first axes
            span its slices. Default: the mesh of `jax.set_mesh`.
        in_shardings: Placement of the arguments: a prefix of the tuple `args`, whose leaves are
            shardings, `PartitionSpec`s for `mesh`, or None.
        donate_argnums: Arguments whose memory the results may use; for a function that is not
            jitted.
        static_argnums: Arguments that are not arrays; for a function that is not jitted.
        compiler_options: Options of the compiler that override those of the step.
        tokens_per_step: See `Strategy.plan`; this and the following ones.
        model_flops: FLOPs of a step on all chips, for the MFU.
        cache: Whether to use a stored answer of the compiler, or a directory for answers.
        in_process: Whether to compile again in this process, so that `Plan.save` has an executable.
        calibration: Measured rates, as in `read_calibration`.
        progress: Called with the current activity and its seconds.

    Raises:
        TypeError: If `step` is not callable, or a `Lowered` is passed with arguments.
        ValueError: If the devices of the step are not those of `topology`, there is no such
            topology, or `mesh` or `in_shardings` do not fit. `plan` also raises what the step does.
        ImportError: If libtpu is missing, or is not the version for this JAX.
        RuntimeError: If the compiler failed for another reason than memory.
    """
    figure_checks.check(tokens_per_step, model_flops)
    measured = None if calibration is None else read_calibration(calibration)
    request = plan_builder.PlanRequest(
        topology, dict(compiler_options or {}), tokens_per_step, model_flops, cache, in_process,
        measured,
    )  # fmt: skip
    with show_progress(progress) as report:
        report("tracing", 0.0)
        started = time.monotonic()
        if isinstance(step, jax.stages.Lowered):
            if args or kwargs or mesh is not None or in_shardings is not None:
                raise TypeError(
                    "planner.plan received a lowered program and arguments. A lowered program has "
                    "its shapes and shardings: pass it alone, or pass the function instead of it."
                )
            traced = _Traced(step, None, "lowered program", ())
        elif not callable(step):
            raise TypeError(
                f"planner.plan received {step!r}, a {type(step).__name__}. Pass a function of JAX "
                "and its arguments, or what its `lower` returns. For a step of a strategy call "
                "strategy.plan."
            )
        else:
            placed = _Placement(topology, mesh).place(step, args, dict(kwargs or {}), in_shardings)
            traced = _trace(step, placed, donate_argnums, static_argnums)
        own_mesh = _find_mesh(traced.lowered)
        _check_devices(topology, own_mesh)
        lowered_step = plan_builder.LoweredStep(
            traced.name,
            traced.lowered,
            _inputs_of(traced, own_mesh),
            num_donated=0,  # the inputs are in the order of the program
            closed=traced.closed,
            compiler_options=request.compiler_options,
        )
        trace_s = time.monotonic() - started
        notes = _notes_on_devices(topology, own_mesh)
        return plan_builder.plan_lowered(lowered_step, own_mesh, 1, notes, request, report, trace_s)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A lowered step.

    Attributes:
        lowered: The program.
        closed: Jaxpr of the step; None if it is not known.
        name: Name of the step.
        arrays: Name and shape of each array among its arguments, in order; empty if the names in
            the program are those of the user.
    """

    lowered: jax.stages.Lowered
    closed: jaxprs.ClosedJaxpr | None
    name: str
    arrays: Sequence[tuple[str, Shape]]


@dataclasses.dataclass(frozen=True)
class _PlacedCall:
    """A call without data.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        arrays: Name and shape of each array, in order.
        surroundings: Makes a context in which the step is traced.
    """

    args: tuple
    kwargs: dict[str, Any]
    arrays: Sequence[tuple[str, Shape]]
    surroundings: Callable[[], AbstractContextManager]


class _Placement:
    """Devices and mesh on which the arguments of a plan are placed."""

    def __init__(self, topology: str | None, mesh: MeshLike | None):
        self._devices = None if topology is None else list(topologies.devices(topology))
        self._mesh = mesh if mesh is None or isinstance(mesh, Mesh) else self._make_mesh(mesh)

    def _make_mesh(self, axes: Mapping[str, int], axis_types: tuple[AxisType, ...] = ()) -> Mesh:
        if self._devices is None:
            raise ValueError(
                f"planner.plan received mesh={dict(axes)!r} without devices. Pass topology=, such "
                'as "v5e-8", or a jax.sharding.Mesh.'
            )
        if any(size < 1 for size in axes.values()):
            raise ValueError(f"mesh={dict(axes)!r} is not supported. Each size must be at least 1.")
        if math.prod(axes.values()) != len(self._devices):
            raise ValueError(
                f"mesh={dict(axes)!r} has {math.prod(axes.values())} devices, but the topology has "
                f"{len(self._devices)}. The product of the sizes must be the number of devices."
            )
        kinds = axis_types or (AxisType.Auto,) * len(axes)
        grid = arrange_slices(self._devices, tuple(axes.values()))
        return Mesh(grid, tuple(axes), axis_types=kinds)

    def place(
        self, step: Callable[..., Any], args: tuple, kwargs: dict[str, Any], in_shardings: PyTree
    ) -> _PlacedCall:
        """Returns the arguments without data, on the devices of the plan."""
        wanted = self._read_shardings(args, in_shardings)
        leaves, treedef = jax.tree.flatten((args, kwargs))
        named = call_description.names_of_leaves(step, args, kwargs)
        # Objects of tpudist and of Flax are one leaf there.
        names = named if len(named) == len(leaves) else [""] * len(leaves)
        placed, arrays = [], []
        for i, (x, name) in enumerate(zip(leaves, names, strict=True)):
            if not isinstance(x, _ARRAYS):
                placed.append(x)
                if isinstance(x, np.generic):  # kept, because it may be a static argument
                    arrays.append((name, ()))
                continue
            sharding = wanted[i] if i < len(wanted) and wanted[i] is not None else self._move(x)
            weak = is_weakly_typed(x)
            placed.append(_AbstractArray(x.shape, x.dtype, sharding=sharding, weak_type=weak))
            arrays.append((name, tuple(x.shape)))
        own_args, own_kwargs = treedef.unflatten(placed)
        return _PlacedCall(own_args, own_kwargs, arrays, self._surroundings)

    def _surroundings(self) -> AbstractContextManager:
        if self._mesh is not None:
            return jax.set_mesh(self._mesh)
        # A step without shardings uses the default device.
        return nullcontext() if self._devices is None else jax.default_device(self._devices[0])

    def _read_shardings(self, args: tuple, in_shardings: PyTree) -> list[Sharding | None]:
        """Returns the requested sharding of each leaf of `args`."""
        if in_shardings is None:
            return []

        def is_leaf(x: object) -> bool:
            return x is None or isinstance(x, PartitionSpec | Sharding)

        if isinstance(in_shardings, list):
            in_shardings = tuple(in_shardings)
        try:
            wanted = jax.tree.broadcast(in_shardings, args, is_leaf=is_leaf)
        except ValueError as error:
            raise ValueError(
                f"in_shardings is not a prefix of the arguments ({len(args)} positional ones): "
                f"{error}. Pass one sharding for all, or a tuple with one entry per argument."
            ) from error
        # None is not a leaf of the arguments, but it is a leaf of `wanted`: an unknown sharding.
        leaves = jax.tree.structure(args).flatten_up_to(wanted)
        return [self._read_sharding(x) for x in leaves]

    def _read_sharding(self, x: PartitionSpec | Sharding | None) -> Sharding | None:
        if not isinstance(x, PartitionSpec):
            return x
        if self._mesh is None:
            mesh = jax.sharding.get_mesh()  # that of `jax.set_mesh`, or an empty one
            if mesh.empty:
                raise ValueError(
                    f"in_shardings has {x}, but there is no mesh. Pass mesh=, such as "
                    '{"data": 4, "model": 2} with topology="v5e-8", or a jax.sharding.Mesh; or '
                    "pass NamedShardings."
                )
            is_used = self._devices is None or _is_described(mesh)
            self._mesh = mesh if is_used else self._make_mesh(mesh.shape, mesh.axis_types)
        return NamedSharding(self._mesh, x)

    def _move(self, x: Any) -> Sharding | None:
        """Returns the sharding of an array on the devices of the plan."""
        sharding = sharding_of(x)
        if not isinstance(sharding, NamedSharding):
            return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())
        mesh = sharding.mesh
        if self._devices is None or _is_described(mesh):
            return sharding
        if self._mesh is None and mesh.size == len(self._devices):
            self._mesh = self._make_mesh(mesh.shape, mesh.axis_types)
        if self._mesh is None or self._mesh.axis_names != mesh.axis_names:
            own = "none" if self._mesh is None else dict(self._mesh.shape)
            raise ValueError(
                f"An argument is on a mesh of {mesh.size} devices, {dict(mesh.shape)}, but the "
                f"topology has {len(self._devices)}, and the mesh of the plan is {own}. Pass mesh= "
                "with the same axes, or arguments without shardings and in_shardings."
            )
        return NamedSharding(self._mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _trace(
    step: Callable[..., Any],
    call: _PlacedCall,
    donate_argnums: int | Sequence[int],
    static_argnums: int | Sequence[int],
) -> _Traced:
    """Lowers a step for the arguments of a call."""
    jitted: Any = step
    if inspect.ismethod(step) and isinstance(step.__func__, _JITTED):
        # A bound method has the `lower` of its function, which must receive the object.
        jitted, call = step.__func__, dataclasses.replace(call, args=(step.__self__, *call.args))
    elif not hasattr(step, "lower"):
        jitted = jax.jit(step, donate_argnums=donate_argnums, static_argnums=static_argnums)
    name = descriptions.name_of(step)
    with call.surroundings():
        try:
            if isinstance(jitted, _JITTED):
                traced = jitted.trace(*call.args, **call.kwargs)
                return _Traced(traced.lower(), traced.jaxpr, name, ())
            lowered = jitted.lower(*call.args, **call.kwargs)
        except ValueError as error:
            for problem, rule in _RULES.items():
                if problem in str(error):
                    raise ValueError(f"{error}\n{rule}") from error
            raise
        # Equinox and Flax wrap the program of JAX.
        lowered = lowered if isinstance(lowered, jax.stages.Lowered) else lowered.lowered
        return _Traced(lowered, _jaxpr_of(jitted, call), name, call.arrays)


def _jaxpr_of(step: Callable[..., Any], call: _PlacedCall) -> jaxprs.ClosedJaxpr:
    """Returns the jaxpr of a step whose `lower` does not keep it, by another trace."""
    leaves, treedef = jax.tree.flatten((call.args, call.kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

    def call_with(arrays: list[jax.Array]) -> list[jax.Array]:
        full = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            full[i] = x
        args, kwargs = treedef.unflatten(full)
        return [x for x in jax.tree.leaves(step(*args, **kwargs)) if isinstance(x, jax.Array)]

    return jax.make_jaxpr(call_with)([leaves[i] for i in places])


def _find_mesh(lowered: jax.stages.Lowered) -> Mesh:
    """Returns the mesh of a program: that of its shardings, or one axis of all its devices."""
    devices = lowered_program.devices_of(lowered)
    for x in lowered_program.inputs_of(lowered):
        mesh = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and list(mesh.devices.flat) == devices:
            return mesh
    return Mesh(np.array(devices), ("devices",))


def _check_devices(topology: str | None, mesh: Mesh) -> None:
    if topology is None:
        return
    requested, described = slices.parse(topology), compiler_process.slice_of([*mesh.devices.flat])
    if described == (requested.libtpu_name, requested.num_slices):
        return
    if described is None:
        found = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    else:
        name, number = described
        found = f"{number}x{name}" if number > 1 else name
    raise ValueError(
        f"The plan is for topology={topology!r}, but the step is lowered for {found}. "
        f"{_DEVICES_RULE}"
    )


def _is_described(mesh: Mesh | AbstractMesh) -> bool:
    return isinstance(mesh, Mesh) and compiler_process.slice_of([*mesh.devices.flat]) is not None


def _notes_on_devices(topology: str | None, mesh: Mesh) -> tuple[str, ...]:
    size = 0 if topology is None else slices.parse(topology).num_devices
    if mesh.size >= size:
        return ()
    return (
        f"The program uses {mesh.size} of the {size} devices of {topology}: the step and its "
        "arguments have no shardings for more. Pass mesh= and in_shardings=.",
    )


def _inputs_of(traced: _Traced, mesh: Mesh) -> list[InputLeaf]:
    """Returns the inputs of a program, with the names of the user if they are known."""
    inputs = lowered_program.inputs_of(traced.lowered)
    whole = NamedSharding(mesh, PartitionSpec())
    arrays = dict(enumerate(traced.arrays))
    names = {x.number: x.name for x in inputs}
    if all(arrays.get(x.number, ("", None))[1] == x.shape for x in inputs):
        names |= {i: name for i, (name, _) in arrays.items() if name}
    return [
        InputLeaf(
            names[x.number],
            input_roles.guess_role(names[x.number]),
            x.shape,
            x.dtype,
            whole if x.sharding is None else x.sharding,
            x.donated,
        )
        for x in inputs
    ]
