"""The time of a run as a table, and the causes of its delays."""

from __future__ import annotations

from collections.abc import Mapping

from tpudist.display.text_tables import Column, TextTable
from tpudist.goodput.diagnosis import LOST, REPLAYED, WAITED, Diagnosis
from tpudist.goodput.goodput import Phase

# Useful time first, then waits inside a run, then the cost of restarts. Activities that are not
# listed here count in the totals, but have no row.
ROWS = (
    Phase.STEP.value,
    WAITED,
    Phase.INPUT.value,
    Phase.COMPILE.value,
    Phase.CHECKPOINT.value,
    Phase.WAIT.value,
    Phase.STARTUP.value,
    LOST,
    REPLAYED,
)
_MAX_CAUSES = 8
_MAX_COLUMNS = 8  # more processes than these are summed up by a median and a maximum


def describe_diagnosis(diagnosis: Diagnosis) -> list[TextTable | str]:
    """Returns the table of phases and the list of causes."""
    return [_table(diagnosis), *_causes(diagnosis)]


def _table(diagnosis: Diagnosis) -> TextTable:
    processes = list(diagnosis.seconds)
    names = [f"process {process}" for process in processes]
    if len(processes) > _MAX_COLUMNS:
        names = ["median", "most", "of process"]
    columns = [Column(is_short=True), *(Column(name, is_number=True) for name in names)]
    rows = []
    for name in ROWS:
        seconds = {i: spent.get(name, 0.0) for i, spent in diagnosis.seconds.items()}
        if not any(seconds.values()):
            continue
        cells = [_cell(seconds[i], diagnosis.seconds[i]) for i in processes]
        if len(processes) > _MAX_COLUMNS:
            order = sorted(processes, key=lambda i: seconds[i])
            # Of an even number of processes, the upper of the two in the middle: a cell must be of
            # a process, because `_cell` also shows its share of the time of that process.
            middle, most = order[len(order) // 2], order[-1]
            cells = [cells[processes.index(middle)], cells[processes.index(most)], str(most)]
        rows.append([name, *cells])
    title = f"{diagnosis.wall_s:.1f} s, {_least_step_share(diagnosis):.0%} of it new steps"
    return TextTable(columns, rows, title)


def _cell(seconds: float, spent: Mapping[str, float]) -> str:
    total = sum(spent.values()) or 1.0
    return f"{seconds:.1f} s {seconds / total:4.0%}" if seconds else ""


def _least_step_share(diagnosis: Diagnosis) -> float:
    # The least share of all processes: a process that waits for others in a collective seems to be
    # in a step.
    return min(
        spent.get(Phase.STEP.value, 0.0) / (sum(spent.values()) or 1.0)
        for spent in diagnosis.seconds.values()
    )


def _causes(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.causes:
        return ["\nNothing delayed the run."]
    causes = diagnosis.causes[:_MAX_CAUSES]
    return [
        "\nCauses of delay, longest first:",
        *(f"{i + 1}. {c.seconds:.1f} s: {c.text}" for i, c in enumerate(causes)),
    ]
