"""`planner.plan`: the plan of a step that knows nothing of tpudist.

The step is a function of `jax.jit`, `shard_map`, `pmap`, Equinox's `filter_jit` or `nnx.jit`, or a
program that was lowered already. It is lowered for descriptions of devices, and planned like a step
of a strategy. `plain_placement` places its arguments, and `plain_program` lowers it.
"""

import dataclasses
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding

from tpudist.array_types import PyTree
from tpudist.keras import keras_scope
from tpudist.keras.method_program import MethodProgram
from tpudist.planner import figure_checks, plan_builder
from tpudist.planner.calibration import Calibration, read_calibration
from tpudist.planner.plain_placement import MeshLike, PlacedCall, Placement
from tpudist.planner.plain_program import (
    DEVICES_RULE,
    Argnums,
    LoweredCall,
    OtherDevices,
    Step,
    lower_call,
    lower_method,
    lower_program,
    require_no_argnums,
)
from tpudist.planner.plan_record import Plan
from tpudist.planner.show.progress import Progress, show_progress
from tpudist.planner.traced_call import TracedCall, trace_call, trace_lowered
from tpudist.programs import jaxprs
from tpudist.xla.compiler import compiler_process, lowered_program
from tpudist.xla.compiler.visible_devices import means_absent_devices
from tpudist.xla.estimate.sizes import format_bytes
from tpudist.xla.hardware import slices

_Call = TypeVar("_Call", LoweredCall, TracedCall)
_NOTED_CONSTANT_BYTES = 2**20
_RULE_OF_LOWERED = (
    "A lowered program keeps its kind of devices. Pass the function, or what its `trace` returns; "
    "or lower it for a mesh of tpudist.planner.devices."
)


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
    complete: bool = False,
    extrapolate: bool = False,
    calibration: str | Path | Mapping[str, Any] | Calibration | None = None,
    progress: Progress | None = None,
    **unknown: PyTree,
) -> Plan:
    """Compiles a step of plain JAX, and returns its memory, time and traffic; nothing is run.

    The plan is for the devices of `topology`. The shardings of the step or of its arguments name
    the axes of a mesh of as many devices, which may be emulated. Without shardings, a step uses one
    device.

    Args:
        step: A function, which is jitted here; a function of `jax.jit`, `jax.pmap`,
            `equinox.filter_jit` or `nnx.jit`; a `jax.stages.Lowered` or `Traced`; or a method of
            a compiled Keras model, such as `model.fit`. The plan covers one step.
        args: Arguments of the step. Arrays may be `jax.ShapeDtypeStruct`s; data are not read. For
            `fit` they are one batch.
        kwargs: Keyword arguments of the step.
        topology: Slice, such as "v5e-8" or "2xv5e-256". A mesh of other devices becomes a mesh of
            the same axes on the slice. Default: the devices of the shardings.
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
        complete: Whether the compiler also generates machine code, which takes minutes.
        extrapolate: Whether to compile only some of many equal layers; see `Strategy.plan`.
        calibration: Measured rates, as in `read_calibration`.
        progress: Called with the current activity and its seconds.

    Raises:
        TypeError: If `step` is not callable, a `Lowered` is passed with arguments, or arguments of
            the step are in a tuple or are keywords of `plan`.
        ValueError: If the devices of the step are not those of `topology`, there is no such
            topology, `mesh` or `in_shardings` do not fit, or `extrapolate` and `in_process` are
            both passed. `plan` also raises what the step does.
        ImportError: If libtpu is missing, or is not the version for this JAX.
        RuntimeError: If the compiler failed for another reason than memory.
    """
    figure_checks.check(tokens_per_step, model_flops)
    if unknown:
        raise TypeError(
            f"planner.plan has no option {next(iter(unknown))!r}. If it is an argument of the "
            f"step, pass kwargs={{{', '.join(f'{name!r}: ...' for name in unknown)}}}."
        )
    measured = None if calibration is None else read_calibration(calibration)
    request = plan_builder.PlanRequest(
        topology, dict(compiler_options or {}), tokens_per_step, model_flops, cache, in_process,
        measured, complete, extrapolate,
    )  # fmt: skip
    argnums = donate_argnums, static_argnums
    with show_progress(progress) as report:
        report("tracing", 0.0)
        started = time.monotonic()
        if callable(step):
            program = keras_scope.open_program(
                step, args, kwargs or {}, in_shardings, topology, None
            )
            if program:
                require_no_argnums(f"{program.name}, a method of Keras", argnums)
                return plan_method(program, mesh, request, report)
        lowered = lower_step(
            step,
            args,
            kwargs=kwargs,
            topology=topology,
            mesh=mesh,
            in_shardings=in_shardings,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
        )
        return _plan_call(lowered, request, report, time.monotonic() - started)


def lower_step(step: Step, args: tuple, **options: Any) -> LoweredCall:
    """Lowers a step, with the options and the errors of `plan`."""
    return _read_step(lower_call, lambda call: call, step, args, **options)


def trace_step(step: Step, args: tuple, **options: Any) -> TracedCall:
    """Traces a step for its estimate, with the options and the errors of `plan`."""
    return _read_step(trace_call, trace_lowered, step, args, **options)


def _read_step(
    read: Callable[[Callable[..., Any], PlacedCall, Argnums], _Call],
    read_lowered: Callable[[LoweredCall], _Call],
    step: Step,
    args: tuple,
    *,
    kwargs: Mapping[str, PyTree] | None = None,
    topology: str | None = None,
    mesh: MeshLike | None = None,
    in_shardings: PyTree = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
) -> _Call:
    argnums = donate_argnums, static_argnums
    if isinstance(step, jax.stages.Lowered | jax.stages.Traced):
        if args or kwargs or mesh is not None or in_shardings is not None:
            raise TypeError(
                "planner.plan received a lowered program and arguments. A lowered program has "
                "its shapes and shardings: pass it alone, or pass the function instead of it."
            )
        require_no_argnums("a lowered program", argnums)
        return read_lowered(lower_program(step, Placement(topology, None)))
    if not callable(step):
        raise TypeError(
            f"planner.plan received {step!r}, a {type(step).__name__}. Pass a function of JAX "
            "and its arguments, or what its `lower` returns. For a step of a strategy call "
            "strategy.plan."
        )
    _check_positional(step, args, kwargs or {})
    values = args, dict(kwargs or {}), in_shardings
    return _read_placed(lambda call: read(step, call, argnums), step, values, topology, mesh)


def _check_positional(step: Callable[..., Any], args: tuple, kwargs: Mapping[str, PyTree]) -> None:
    """Raises `TypeError` for the arguments in one tuple, as `Strategy.plan` receives them."""
    if len(args) != 1 or type(args[0]) not in (tuple, list):
        return
    try:
        signature = inspect.signature(step)
        signature.bind(*args[0], **kwargs)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"planner.plan received one {type(args[0]).__name__} for the {len(args[0])} arguments "
            "of the step. Pass them one by one: planner.plan(step, *args)."
        ) from error


def _read_placed(
    read: Callable[[PlacedCall], _Call],
    step: Callable[..., Any],
    values: tuple[tuple, dict[str, Any], PyTree],
    topology: str | None,
    mesh: MeshLike | None,
) -> _Call:
    for computes in (False, True):
        placement = Placement(topology, mesh, computes)
        try:
            call = read(placement.place(step, *values))
        except OtherDevices as error:
            if topology is None:
                raise
            if not means_absent_devices(error):
                break
        else:
            if call.mesh is None or placement.has_devices(call.mesh):
                return call
            break
    # The mesh of the step has devices of this machine, which may be emulated. The program names
    # only its axes, so it is lowered for them, and compiled for as many devices of the slice.
    if isinstance(mesh, Mapping):
        raise ValueError(
            f"planner.plan received mesh={dict(mesh)!r}, but the step has a mesh of its own. Omit "
            "mesh, and specs in in_shardings."
        )
    own = Placement(None, mesh).place(step, *values)
    call = read(placement.lower_elsewhere(own))
    own_mesh = None if call.mesh is None else placement.mesh_like(call.mesh)
    return dataclasses.replace(call, slice_mesh=own_mesh)


def plan_method(
    program: MethodProgram,
    mesh: MeshLike | None,
    request: plan_builder.PlanRequest,
    report: Progress,
) -> Plan:
    """Returns the plan of one step of a method, such as `fit` of a Keras model."""
    if mesh is not None and program.in_shardings is None:
        raise ValueError(
            f"planner.plan received mesh={mesh!r} with {program.name}, whose strategy has a mesh "
            "of its own. Omit mesh."
        )
    started = time.monotonic()
    placement = Placement(request.topology, mesh)
    placed = placement.place(program.jit, program.args, {}, program.in_shardings)
    lowered = lower_method(program, placed)
    return _plan_call(lowered, request, report, time.monotonic() - started)


def _plan_call(
    lowered: LoweredCall, request: plan_builder.PlanRequest, report: Progress, trace_s: float
) -> Plan:
    mesh = lowered.mesh
    _check_devices(request.topology, mesh)
    step = plan_builder.LoweredStep(
        lowered.name,
        lowered.lowered,
        lowered.inputs(mesh),
        num_donated=0,  # the inputs are in the order of the program
        closed=lowered.closed,
        compiler_options=request.compiler_options,
    )
    notes = _notes_on_devices(request.topology, mesh) + _notes_on_axes(lowered, mesh)
    notes += _notes_on_values(lowered.closed)
    return plan_builder.plan_lowered(step, mesh, 1, notes, request, report, trace_s)


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
    rule = _RULE_OF_LOWERED if mesh.size == requested.num_devices else DEVICES_RULE
    raise ValueError(
        f"The plan is for topology={topology!r}, but the step is lowered for {found}. {rule}"
    )


def _notes_on_devices(topology: str | None, mesh: Mesh) -> tuple[str, ...]:
    size = 0 if topology is None else slices.parse(topology).num_devices
    if mesh.size >= size:
        return ()
    return (
        f"The program uses {mesh.size} of the {size} devices of {topology}: the step and its "
        "arguments have no shardings for more. Pass mesh= and in_shardings=.",
    )


def _notes_on_axes(lowered: LoweredCall, mesh: Mesh) -> tuple[str, ...]:
    """Returns a note on the axes of a mesh that split nothing."""
    if lowered.closed is None:
        return ()
    shardings = [x.sharding for x in lowered.inputs(mesh)]
    shardings += lowered_program.result_shardings_of(lowered.lowered)
    used = set[Any]()
    for eqn in jaxprs.walk(lowered.closed):
        if eqn.primitive.name == "sharding_constraint":
            shardings.append(eqn.params["sharding"])
        elif eqn.primitive.name == "shard_map":
            used |= {*eqn.params["mesh"].axis_names}
    for sharding in filter(None, shardings):
        if not isinstance(sharding, NamedSharding):
            return ()  # of `pmap`, or unknown
        used |= {name for x in sharding.spec for name in (x if isinstance(x, tuple) else (x,))}
    unused = [f"{name} ({n})" for name, n in mesh.shape.items() if n > 1 and name not in used]
    if not unused:
        return ()
    return (
        f"Nothing is split over {', '.join(unused)} of the mesh, so these devices all compute the "
        "same. Name the axis in in_shardings=, or in the shardings of the arguments.",
    )


def _notes_on_values(program: jaxprs.ClosedJaxpr | None) -> tuple[str, ...]:
    if program is None:
        return ()
    if not (program.jaxpr.outvars or program.effects):
        return (
            "The step returns nothing, so its program is empty. Return the new state; to update "
            "NNX objects in place, use nnx.jit instead of jax.jit.",
        )
    arrays = {id(x): x.nbytes for x in jaxprs.constants_of(program) if hasattr(x, "nbytes")}
    num_bytes = sum(arrays.values())
    if num_bytes < _NOTED_CONSTANT_BYTES:
        return ()
    return (
        f"The step does not receive {format_bytes(num_bytes)} of arrays as arguments: it closes "
        "over them, or they belong to the object of a method. They are constants of the "
        "program, whose bytes the plan omits. Pass them as arguments; for a method, plan the "
        "jitted function that it calls.",
    )
