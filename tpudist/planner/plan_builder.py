"""The plan of a step: traces and lowers it, queries the compiler, and reads the compiled program.

`Strategy.plan` checks its arguments and moves them to the devices of the plan first.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpudist.context.strategy_base import StrategyBase
from tpudist.options import RunOptions
from tpudist.planner import (
    compiler_query,
    extrapolation,
    input_roles,
    model_flops,
    plan_notes,
    program_figures,
    saved_plan,
)
from tpudist.planner.abstract_arguments import TwinArguments
from tpudist.planner.calibration import Calibration
from tpudist.planner.plan_record import Plan
from tpudist.planner.program_figures import Figures
from tpudist.planner.show.progress import Progress
from tpudist.programs import jaxprs
from tpudist.run.step_cache import Replicator
from tpudist.xla.compiler.visible_devices import show_devices
from tpudist.xla.devices import slice_index
from tpudist.xla.estimate import refusal
from tpudist.xla.estimate.memory import InputLeaf
from tpudist.xla.hardware import chips


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """The arguments of `Strategy.plan` other than the call and its options, documented there."""

    topology: str | None
    compiler_options: dict[str, Any]
    tokens_per_step: int | None
    model_flops: float | None
    cache: bool | str | Path
    in_process: bool
    calibration: Calibration | None = None
    complete: bool = False
    extrapolate: bool = False

    def __post_init__(self) -> None:
        if self.extrapolate and self.in_process:
            raise ValueError(
                "plan received extrapolate=True and in_process=True. An executable needs all "
                "layers: omit one of them."
            )


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """A step, lowered for devices that may exist only as descriptions.

    Attributes:
        name: Name of the function.
        lowered: Input of the compiler.
        inputs: Flat inputs of the program, including unused ones.
        num_donated: Number of inputs that are overwritten; they are the first.
        closed: Jaxpr of one replica; None if it is not known.
        compiler_options: All options of the compiler.
    """

    name: str
    lowered: jax.stages.Lowered
    inputs: list[InputLeaf]
    num_donated: int
    closed: jaxprs.ClosedJaxpr | None
    compiler_options: dict[str, Any]


def plan(
    twin: StrategyBase,
    fn: Callable[..., Any],
    call: TwinArguments,
    options: RunOptions | None,
    request: PlanRequest,
    report: Progress,
) -> Plan:
    """Returns the plan of a step on the devices of `twin`; see `Strategy.plan`."""
    _find_chip(twin.mesh, request.calibration)  # raises before the step is traced
    started = time.monotonic()
    step = lower(twin, fn, call, options, request.compiler_options, report)
    trace_s = time.monotonic() - started
    num_replicas = twin.replica_mesh.num_replicas
    return plan_lowered(step, twin.mesh, num_replicas, call.notes, request, report, trace_s)


def plan_lowered(
    step: LoweredStep,
    mesh: jax.sharding.Mesh,
    num_replicas: int,
    notes: Sequence[str],
    request: PlanRequest,
    report: Progress,
    trace_s: float,
) -> Plan:
    """Returns the plan of a lowered step, whose jaxpr `num_replicas` replicas execute."""
    chip = _find_chip(mesh, request.calibration)

    def compile_and_read(lowered: jax.stages.Lowered) -> tuple[compiler_query.Answer, Figures]:
        answer = compiler_query.ask_compiler(
            lowered,
            mesh,
            step.compiler_options,
            cache=request.cache,
            in_process=request.in_process,
            complete=request.complete,
            report=report,
        )
        report("reading", 0.0)
        return answer, program_figures.read(
            answer, step.inputs, step.num_donated, step.closed, mesh, chip
        )

    found = None
    if request.extrapolate:
        found = extrapolation.from_few_layers(step.lowered, compile_and_read)
        if found is None:
            notes = (*notes, extrapolation.NOTE_ON_COMPLETE_STEP)
    answer, figures = found or compile_and_read(step.lowered)
    flops, narrow, notes_on_flops = _count_flops(request, step, num_replicas)
    notes = (
        *notes,
        *plan_notes.on_rates(request.calibration),
        *notes_on_flops,
        *figures.notes,
        *plan_notes.on_answer(answer),
    )
    plan = Plan(
        name=step.name,
        topology=request.topology or _name_devices(mesh, chip),
        chip=chip.generation if chip else "",
        num_chips=_num_chips(mesh, chip),
        num_devices=mesh.size,
        mesh={str(name): size for name, size in mesh.shape.items()},
        num_replicas=num_replicas,
        fits=answer.refusal is None,
        refusal=_explain_refusal(answer, step),
        memory=figures.memory,
        time=figures.time,
        collectives=figures.collectives,
        tokens_per_step=request.tokens_per_step,
        model_flops=flops,
        narrow_flops=narrow,
        trace_s=trace_s,
        compile_s=answer.seconds,
        versions=compiler_query.versions(),
        program=answer.key,  # candidates of a search with equal keys have the same program
        notes=notes,
        _source=saved_plan.ProgramSource(
            step.name, step.lowered, mesh, step.compiler_options, answer.compiled
        ),
    )
    return plan if request.model_flops is not None else _without_removed_products(plan)


def _without_removed_products(plan: Plan) -> Plan:
    """Returns the plan with at most the FLOPs that the program runs, if its MFU exceeds 100 %."""
    if plan.time is None or plan.model_flops is None or (plan.mfu or 0.0) <= 1.0:
        return plan
    share = plan.time.flops * plan.num_devices / plan.model_flops
    note = (
        "XLA removes products whose results are not used, parts of products, and repetitions: the "
        f"program runs {share:.0%} of the model FLOPs. The MFU counts these."
    )
    return dataclasses.replace(
        plan,
        model_flops=share * plan.model_flops,
        narrow_flops={kind: share * flops for kind, flops in plan.narrow_flops.items()},
        notes=(*plan.notes, note),
    )


def _count_flops(
    request: PlanRequest, step: LoweredStep, num_replicas: int
) -> tuple[float | None, dict[str, float], tuple[str, ...]]:
    """Returns the FLOPs that the caller counted, or else those of the jaxpr, with notes on them.

    The second result is the FLOPs of narrow numbers, by kind.
    """
    if request.model_flops is not None:
        return request.model_flops, {}, ()
    if step.closed is None:
        note = (
            "The plan has no MFU: a lowered program does not say which operations the model "
            "needs. Pass the function, or model_flops."
        )
        return None, {}, (note,)
    by_kind, notes = model_flops.model_flops(step.closed, num_replicas)
    narrow = {kind: flops for kind, flops in by_kind.items() if kind != "bf16"}
    return sum(by_kind.values(), 0.0), narrow, notes


def lower(
    twin: StrategyBase,
    fn: Callable[..., Any],
    call: TwinArguments,
    options: RunOptions | None,
    compiler_options: dict[str, Any],
    report: Progress,
) -> LoweredStep:
    """Returns the step that `twin.run` would compile for these arguments."""
    started = time.monotonic()
    # Not `twin.scope()`: `Strategy.plan` runs in the scope of the strategy, which stays the current
    # one.
    with contextlib.ExitStack() as stack:
        stack.enter_context(twin._use_mesh())
        if compiler_query.is_described(twin.mesh):
            stack.enter_context(show_devices([*twin.mesh.devices.flat]))

        def report_lowering() -> None:
            report("lowering", time.monotonic() - started)

        replicator: Replicator = twin._replicator
        step, run_call, lowered, donated, kept = replicator.lower_with_inputs(
            fn, call.args, call.kwargs, options, traced=report_lowering
        )
    # The keyword arguments of JAX's `compile`; only its dict of XLA options is needed.
    strategy_options = step.program.compiler_options.get("compiler_options", {})
    *_, last_trace = step.traces.by_signature.values()  # the last trace was lowered
    return LoweredStep(
        step.signature.function.name,
        lowered,
        input_roles.inputs_of(step, run_call, donated, kept, call.batch_ids),
        len(donated),
        last_trace.program.closed,
        # The caller's options override those of the strategy, as `Strategy.plan` documents.
        {**strategy_options, **compiler_options},
    )


def _find_chip(mesh: jax.sharding.Mesh, calibration: Calibration | None) -> chips.Chip | None:
    """Returns the chip of the devices, perhaps with measured rates; None if it is unknown."""
    chip = chips.chip_of_device(mesh.devices.flat[0])
    if calibration is None:
        return chip
    if chip is None:
        raise ValueError(
            f"plan(calibration=...) for {_name_devices(mesh, chip)}: a calibration changes "
            f"estimated times, and plans estimate times only for TPUs. Omit it, or pass "
            f"topology=, such as 'v5e-8'."
        )
    return calibration.apply(chip)


def _num_chips(mesh: jax.sharding.Mesh, chip: chips.Chip | None) -> int:
    """Returns the number of chips in the mesh. Some generations have two devices per chip."""
    if chip is None:
        return mesh.size
    # Both devices of a chip have its coordinates, and each slice has the same coordinates.
    return len({(slice_index(d), *d.coords) for d in mesh.devices.flat})


def _name_devices(mesh: jax.sharding.Mesh, chip: chips.Chip | None) -> str:
    """Returns a name such as "2xv5e:4x4" if the devices fill the box around them.

    For other devices it is their number and kind, such as "3 x TPU v5 lite".
    """
    devices = list(mesh.devices.flat)
    numbers = {slice_index(d) for d in devices}
    if chip is not None:
        coords = np.array([d.coords[: chip.torus_dims] for d in devices])
        shape = np.ptp(coords, axis=0) + 1  # of the smallest box around the devices
        # If the box has as many devices in each slice as there are, none is missing in it.
        if shape.prod() * chip.devices_per_chip * len(numbers) == len(devices):
            name = f"{chip.generation}:{'x'.join(map(str, shape))}"
            return f"{len(numbers)}x{name}" if len(numbers) > 1 else name
    return f"{len(devices)} x {devices[0].device_kind}"


def _explain_refusal(answer: compiler_query.Answer, step: LoweredStep) -> refusal.Refusal | None:
    """Returns the refusal of the compiler with the user's names of the inputs."""
    if answer.refusal is None:
        return None
    # A refusal names buffers by parameter numbers of the program, from which XLA removed unused
    # inputs.
    inputs = input_roles.select_used(answer.refusal, step.inputs, step.num_donated)
    return refusal.explain(answer.refusal, [leaf.name for leaf in inputs])
