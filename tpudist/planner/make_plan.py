"""Makes a plan: traces and lowers a step, asks the compiler, and reads what it made."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpudist.context.strategy_base import StrategyBase
from tpudist.options import RunOptions
from tpudist.planner import ask_compiler, input_roles, model_flops, saved_plan
from tpudist.planner.abstract_arguments import TwinArguments
from tpudist.planner.calibration import Calibration
from tpudist.planner.plan import Plan
from tpudist.planner.show.progress import Progress
from tpudist.run.step_cache import Replicator
from tpudist.xla.estimate import collective_traffic, memory, refusal, step_time, timeline
from tpudist.xla.hardware import chips
from tpudist.xla.hlo import hlo_module
from tpudist.xla.hlo.compiled_program import CompiledProgram


@dataclasses.dataclass(frozen=True)
class Request:
    """What a caller of `Strategy.plan` asked for; see there."""

    topology: str | None
    compiler_options: dict[str, Any]
    tokens_per_step: int | None
    model_flops: float | None
    cache: bool | str | Path
    in_process: bool
    calibration: Calibration | None = None


def plan(
    twin: StrategyBase,
    fn: Callable[..., Any],
    call: TwinArguments,
    options: RunOptions | None,
    request: Request,
    tell: Progress,
) -> Plan:
    """The plan of a step on the devices of `twin`; see `Strategy.plan`."""
    mesh = twin.mesh
    chip = chips.chip_of_device(mesh.devices.flat[0])
    notes = list(call.notes)
    if request.calibration is not None:
        if chip is None:
            raise ValueError(
                f"plan(calibration=...) for {_name_devices(mesh, chip)}: a calibration changes "
                f"estimated times, and plans estimate times only for TPUs. Omit it, or pass "
                f"topology=, such as 'v5e-8'."
            )
        chip = request.calibration.apply(chip)
        notes.append("Times use the measured rates of the calibration, not the published rates.")
    started = time.monotonic()
    lowered = lower(twin, fn, call, options, request.compiler_options, tell)
    trace_s = time.monotonic() - started
    answer = ask_compiler.ask(
        lowered.program,
        mesh,
        lowered.compiler_options,
        cache=request.cache,
        in_process=request.in_process,
        tell=tell,
    )
    tell("reading", 0.0)
    flops = request.model_flops
    if flops is None:
        flops, more = model_flops.model_flops(lowered.closed, twin.replica_mesh.num_replicas)
        notes += more
    module = hlo_module.parse(answer.program.text) if answer.program else None
    found = _read(answer.program, module, lowered, mesh, chip)
    notes += _notes_on_unknowns(module, found["time"])
    if answer.was_kept:
        notes.append(
            "The compiler was not called again: the plan uses its kept answer for this program."
        )
    if answer.lines_moved:
        notes.append(
            "Source lines are from the time of that answer: cache=False calls the compiler again, "
            "for current lines."
        )
    return Plan(
        name=lowered.name,
        topology=request.topology or _name_devices(mesh, chip),
        chip=chip.generation if chip else "",
        num_chips=_num_chips(mesh, chip),
        num_devices=mesh.size,
        mesh={str(name): size for name, size in mesh.shape.items()},
        num_replicas=twin.replica_mesh.num_replicas,
        fits=answer.refusal is None,
        refusal=_refusal(answer, lowered),
        tokens_per_step=request.tokens_per_step,
        model_flops=flops,
        trace_s=trace_s,
        compile_s=answer.seconds,
        versions=ask_compiler.versions(),
        program=answer.key,
        notes=tuple(notes),
        _source=saved_plan.Source(
            lowered.name, lowered.program, mesh, lowered.compiler_options, answer.compiled
        ),
        **found,
    )


def _num_chips(mesh: jax.sharding.Mesh, chip: chips.Chip | None) -> int:
    """How many chips the devices of a mesh are of, of which some have two."""
    if chip is None:
        return mesh.size
    return len({(getattr(d, "slice_index", None) or 0, *d.coords) for d in mesh.devices.flat})


def _notes_on_unknowns(
    module: hlo_module.Module | None, time: step_time.TimeEstimate | None
) -> list[str]:
    """Notes on what is counted for less than it may be."""
    notes = []
    if module and module.unknown_trip_counts:
        notes.append(
            "The program does not contain the number of iterations of these loops, so each counts "
            f"once: {_list_first(module.unknown_trip_counts)}."
        )
    if time and time.unknown_kernels:
        notes.append(
            "The number of operations of these kernels is unknown, so only their bytes count: "
            f"{_list_first(time.unknown_kernels)}. To declare it, pass a cost_estimate to "
            "pl.pallas_call."
        )
    return notes


def _list_first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _name_devices(mesh: jax.sharding.Mesh, chip: chips.Chip | None) -> str:
    """What the devices of a mesh are called: a slice, if they are whole ones."""
    devices = list(mesh.devices.flat)
    numbers = {getattr(d, "slice_index", None) or 0 for d in devices}
    if chip is not None:
        coords = np.array([d.coords[: chip.torus_dims] for d in devices])
        shape = np.ptp(coords, axis=0) + 1
        if shape.prod() * chip.devices_per_chip * len(numbers) == len(devices):
            name = f"{chip.generation}:{'x'.join(map(str, shape))}"
            return f"{len(numbers)}x{name}" if len(numbers) > 1 else name
    return f"{len(devices)} x {devices[0].device_kind}"


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """A step, lowered for devices that need not be there.

    Attributes:
        name: Of the function.
        program: What the compiler is given.
        inputs: What the flat inputs of the program are, those that it does not use included.
        num_donated: How many of them are overwritten: the first.
        closed: The jaxpr of one replica.
        compiler_options: All of them.
    """

    name: str
    program: Any
    inputs: list[memory.InputLeaf]
    num_donated: int
    closed: Any
    compiler_options: dict[str, Any]


def lower(
    twin: StrategyBase,
    fn: Callable[..., Any],
    call: TwinArguments,
    options: RunOptions | None,
    compiler_options: dict[str, Any],
    tell: Progress,
) -> LoweredStep:
    """The step that `twin.run` would compile for these arguments."""
    started = time.monotonic()
    with twin._use_mesh():

        def report_lowering() -> None:
            tell("lowering", time.monotonic() - started)

        replicator: Replicator = twin._replicator
        step, now, program, donated, kept = replicator.lower_with_inputs(
            fn, call.args, call.kwargs, options, traced=report_lowering
        )
    own = step.compiler_options.get("compiler_options", {})
    *_, found = step.traced.values()
    return LoweredStep(
        step.function.name,
        program,
        input_roles.inputs_of(step, now, donated, kept, call.batches),
        len(donated),
        found.program.closed,
        {**own, **compiler_options},
    )


def _refusal(answer: ask_compiler.Answer, lowered: LoweredStep) -> refusal.Refusal | None:
    """Why it does not fit, in words of the user's."""
    if answer.refusal is None:
        return None
    inputs = input_roles.select_used(answer.refusal, lowered.inputs, lowered.num_donated)
    return refusal.explain(answer.refusal, [leaf.name for leaf in inputs])


def _read(
    program: CompiledProgram | None,
    module: hlo_module.Module | None,
    lowered: LoweredStep,
    mesh: jax.sharding.Mesh,
    chip: chips.Chip | None,
) -> dict[str, Any]:
    """What the program holds, sends and takes."""
    if program is None or module is None:
        return {"memory": None, "time": None, "collectives": ()}
    inputs = input_roles.select_used(program.text, lowered.inputs, lowered.num_donated)
    played = timeline.play(module, mesh, chip)
    return {
        "memory": memory.report(program, module, inputs, chip, mesh),
        "time": None if chip is None else step_time.estimate_from_timeline(module, chip, played),
        "collectives": tuple(collective_traffic.uses_of_timeline(played)),
    }
