"""The notes of a plan: what its figures do not contain, and advice."""

from collections.abc import Sequence

from tpudist.display.text_tables import format_source
from tpudist.planner import compiler_query
from tpudist.planner.calibration import Calibration
from tpudist.planner.show.formats import format_bytes, list_first
from tpudist.xla.estimate import collective_traffic, loop_copies, timeline
from tpudist.xla.estimate.step_time import TimeEstimate
from tpudist.xla.hlo import hlo_module

_MIN_SHARE_OF_COPIES = 0.02  # of a step, that are worth a note
_MIN_SHARE_OF_EXCHANGES = 0.2
# Advice on values that a loop copies.
_CARRY = (
    "Keep the whole value in the carry of the loop, instead of taking parts as inputs and outputs "
    "of the scan, and"
)
_KEEP_LAYOUT = (
    "If an update writes one row of a tile, the compiler keeps the value in another layout inside "
    "the loop. So"
)
_WRITE_BLOCKS = (
    "write aligned blocks of 16 rows: read the block, replace the row, and write the block "
    "(docs/plan_a_server.md)."
)
KEPT_ANSWER = "The compiler was not called again: the plan uses its kept answer for this program."
OLD_LINES = (
    "Source lines are from the time of that answer: cache=False calls the compiler again, for "
    "current lines."
)


def on_unknowns(module: hlo_module.Module, time: TimeEstimate | None) -> list[str]:
    """Returns notes on loops and kernels that count for less than they may take."""
    notes = []
    if module.unknown_trip_counts:
        notes.append(
            "The program does not contain the number of iterations of these loops, so each counts "
            f"once: {list_first(module.unknown_trip_counts)}."
        )
    if time and time.unknown_kernels:
        notes.append(
            "The number of operations of these kernels is unknown, so only their bytes count: "
            f"{list_first(time.unknown_kernels)}. To declare it, pass a cost_estimate to "
            "pl.pallas_call."
        )
    return notes


def on_copies(
    module: hlo_module.Module,
    simulated: timeline.Timeline,
    time: TimeEstimate | None,
    names: Sequence[str],
) -> list[str]:
    """Returns advice on loops that copy values which they only update."""
    if time is None:
        return []
    return [
        f"A loop copies {format_bytes(copy.num_bytes)} per step of "
        f"{list_first(copy.names) or 'a value'}, which it only updates"
        f"{f' ({copy.source})' if copy.source else ''}: {copy.seconds / time.step_s:.0%} of the "
        f"step. {_KEEP_LAYOUT if copy.is_carried else _CARRY} {_WRITE_BLOCKS}"
        for copy in loop_copies.find(module, simulated, names)
        if copy.seconds > _MIN_SHARE_OF_COPIES * time.step_s
    ]


def on_exchanges(
    transfers: Sequence[collective_traffic.CollectiveUse], time: TimeEstimate | None
) -> list[str]:
    """Returns advice on all-to-alls that are not in the program of the user, but XLA adds."""
    added = [x for x in transfers if x.kind == "all-to-all" and "all_to_all" not in x.op_name]
    waited_s = sum(x.exposed_s for x in added)
    if time is None or waited_s < _MIN_SHARE_OF_EXCHANGES * time.step_s:
        return []
    longest = sorted(added, key=lambda x: -x.exposed_s)
    lines = dict.fromkeys(format_source(x.source) for x in longest if x.source)
    return [
        f"{waited_s / time.step_s:.0%} of the step waits for all-to-alls that XLA adds "
        f"({list_first([*lines])}). If they move activations, keep these where their rows "
        "are: constrain them in each layer (jax.lax.with_sharding_constraint)."
    ]


def on_rates(calibration: Calibration | None) -> list[str]:
    """Returns a note on measured rates."""
    if calibration is None:
        return []
    return [f"Times use measured rates of {calibration.describe()}. Other rates are published."]


def on_answer(answer: compiler_query.Answer) -> list[str]:
    """Returns notes on a compiler that was not called."""
    notes = []
    if answer.is_cached:
        notes.append(KEPT_ANSWER)
    if answer.lines_moved:
        notes.append(OLD_LINES)
    return notes
