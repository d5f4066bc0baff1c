"""`tpudist doctor`: whether this machine can run, and what the time of a run went to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tyro
from rich.table import Table
from rich.text import Text

from tpudist.cli import examination_table
from tpudist.cli.console import make_table, show, write
from tpudist.cli.errors import WrongUse
from tpudist.goodput.diagnosis import LOST, REPLAYED, WAITED, Diagnosis, diagnose
from tpudist.goodput.goodput import Phase
from tpudist.goodput.run_history import NoLedger, read_run
from tpudist.supervisor.doctor.examination import examine, is_well
from tpudist.xla import emulation

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
_SHOWN = 8
_COLUMNS = 8


@dataclass(frozen=True)
class Options:
    """Checks this machine, or says what the time of a run went to: tpudist doctor [runs/latest]."""

    run: tyro.conf.Positional[str | None] = None
    """The folder of a run, where tpudist.record_goodput or TPUDIST_GOODPUT has noted it. Without
    one, this machine is checked."""
    emulate: int | None = None
    """Checks with so many emulated CPU devices, as TPUDIST_EMULATE does, in place of the host's."""
    processes: int = 1
    """Has so many local processes of emulated devices meet, too; two devices each, or --emulate."""
    timeout_s: float = 60.0
    """How long devices, and processes, may take to start and compute."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Prints what the checks have found as JSON."""


def run(options: Options) -> int:
    """Prints the checks, or the shares and the causes of a run; returns the exit code."""
    if options.run is None:
        return _examine(options)
    if options != Options(run=options.run):
        raise WrongUse("The options are for checks of this machine. Leave them out, or the folder.")
    try:
        diagnosis = diagnose(read_run(options.run))
    except NoLedger as error:
        raise WrongUse(str(error)) from error
    show(_table(diagnosis), *_causes(diagnosis))
    return 0


def _examine(options: Options) -> int:
    for name in ("emulate", "processes", "timeout_s"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise WrongUse(f"--{name.replace('_', '-')} {value}: it must be 1 at least.")
    try:
        num_emulated = options.emulate
        if num_emulated is None:
            num_emulated = emulation.devices_of_environment()
    except ValueError as error:
        raise WrongUse(str(error)) from error
    answers = examine(num_emulated, options.processes, options.timeout_s)
    if options.json:
        write(examination_table.to_json(answers))
    else:
        show(*examination_table.draw_answers(answers))
        details = examination_table.format_details(answers)
        if details:
            write(details)
    return 0 if is_well(answers) else 1


def _table(diagnosis: Diagnosis) -> Table:
    title = f"{diagnosis.wall_s:.1f} s, {_share(diagnosis):.0%} of it new steps"
    table = make_table(title=title, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    processes = list(diagnosis.seconds)
    if len(processes) <= _COLUMNS:
        for process in processes:
            table.add_column(f"process {process}", justify="right", no_wrap=True)
    else:
        for name in ("median", "most", "of process"):
            table.add_column(name, justify="right", no_wrap=True)
    for name in ROWS:
        found = {i: spent.get(name, 0.0) for i, spent in diagnosis.seconds.items()}
        if not any(found.values()):
            continue
        cells = [_cell(found[i], diagnosis.seconds[i]) for i in processes]
        if len(processes) > _COLUMNS:
            order = sorted(processes, key=lambda i: found[i])
            middle, most = order[len(order) // 2], order[-1]
            cells = [cells[processes.index(middle)], cells[processes.index(most)], str(most)]
        table.add_row(name, *cells)
    return table


def _cell(seconds: float, spent: Mapping[str, float]) -> str:
    total = sum(spent.values()) or 1.0
    return f"{seconds:.1f} s {seconds / total:4.0%}" if seconds else ""


def _share(diagnosis: Diagnosis) -> float:
    """Of the process with the least: one that others wait for seems to be in steps itself."""
    return min(
        spent.get(Phase.STEP.value, 0.0) / (sum(spent.values()) or 1.0)
        for spent in diagnosis.seconds.values()
    )


def _causes(diagnosis: Diagnosis) -> list[Text]:
    if not diagnosis.causes:
        return [Text("\nNothing has held it up.")]
    causes = diagnosis.causes[:_SHOWN]
    return [
        Text("\nWhat has held it up, the longest first:"),
        *(Text(f"{i + 1}. {c.seconds:.1f} s: {c.text}") for i, c in enumerate(causes)),
    ]
