"""Reads the memory, the time and the transfers of a step from its compiled program."""

import dataclasses
from collections.abc import Sequence

import jax

from tpudist.planner import branch_shares, compiler_query, input_roles, plan_notes
from tpudist.programs import jaxprs
from tpudist.xla.estimate import collective_traffic, memory, step_time, timeline
from tpudist.xla.estimate.collective_traffic import CollectiveUse
from tpudist.xla.estimate.memory import InputLeaf, MemoryReport
from tpudist.xla.estimate.step_time import TimeEstimate
from tpudist.xla.hardware import chips
from tpudist.xla.hlo import hlo_module


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of a compiled program; all empty for a program that does not fit."""

    memory: MemoryReport | None = None
    time: TimeEstimate | None = None
    collectives: tuple[CollectiveUse, ...] = ()
    notes: tuple[str, ...] = ()


def read(
    answer: compiler_query.Answer,
    inputs: Sequence[InputLeaf],
    num_donated: int,
    closed: jaxprs.ClosedJaxpr | None,
    mesh: jax.sharding.Mesh,
    chip: chips.Chip | None,
) -> Figures:
    """Returns the figures of a program; see `plan_builder.LoweredStep` for its inputs."""
    if answer.program is None:
        return Figures()
    choices = None if closed is None else branch_shares.find(closed)
    text, has_cycles = answer.program.text, answer.is_complete
    module = hlo_module.parse(text, choices=choices, has_cycles=has_cycles)
    inputs = input_roles.select_used(text, inputs, num_donated)
    simulated = timeline.simulate(module, mesh, chip)
    time = None if chip is None else step_time.estimate(module, chip, simulated)
    transfers = collective_traffic.uses(simulated)
    return Figures(
        memory.report(answer.program, module, inputs, chip, mesh),
        time,
        tuple(transfers),
        (
            *plan_notes.on_unknowns(module, time),
            *plan_notes.on_exchanges(transfers, time),
            *plan_notes.on_copies(module, simulated, time, [leaf.name for leaf in inputs]),
        ),
    )
