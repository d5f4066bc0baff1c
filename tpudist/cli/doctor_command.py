"""`tpudist doctor`: checks of this machine and its accelerators, and the time of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table
from rich.text import Text

from tpudist.cli import examination_table, installed_versions
from tpudist.cli.accelerator import accelerator_check, accelerator_report
from tpudist.cli.console import make_table, say, show, write
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
    """Check this machine or its accelerators, or explain the time of a run.

    Examples: tpudist doctor; tpudist doctor --accelerator; tpudist doctor runs/latest
    """

    run: tyro.conf.Positional[str | None] = None
    """Folder of a run with records of tpudist.record_goodput. Without it, check this machine."""
    accelerator: tyro.conf.FlagCreatePairsOff[bool] = False
    """Check numbers and measure speed on all devices of this host, and write a report."""
    output: Path = Path("accelerator_report.json")
    """With --accelerator: file of the report; the text is written to the same name with .txt."""
    minutes: float = 10.0
    """With --accelerator: time limit."""
    report: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print versions, devices and checks as Markdown, to paste into a bug report."""
    emulate: int | None = None
    """Number of emulated CPU devices (default: use the devices of this host)."""
    processes: int = 1
    """Number of local processes to connect, with two emulated devices each, or --emulate."""
    timeout_s: float = 60.0
    """Seconds that devices and processes may take to start and compute."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the result as JSON."""


def run(options: Options) -> int:
    """Prints the checks, or the shares and the causes of a run; returns the exit code."""
    if options.run is None:
        _check_numbers(options)
        return _check_accelerator(options) if options.accelerator else _examine(options)
    if options != Options(run=options.run):
        raise WrongUse("The options are for checks of this machine. Leave them out, or the folder.")
    try:
        diagnosis = diagnose(read_run(options.run))
    except NoLedger as error:
        raise WrongUse(str(error)) from error
    show(_table(diagnosis), *_causes(diagnosis))
    return 0


def _check_numbers(options: Options) -> None:
    for name in ("emulate", "processes", "timeout_s", "minutes"):
        value = getattr(options, name)
        least = 0.1 if name == "minutes" else 1
        if value is not None and not value >= least:
            raise WrongUse(f"--{name.replace('_', '-')} {value}: it must be at least {least}.")
    if options.accelerator and (options.report or options.processes != 1):
        raise WrongUse("--accelerator has a report of its own: omit --report and --processes.")


def _num_emulated(options: Options) -> int | None:
    try:
        return options.emulate or emulation.devices_of_environment()
    except ValueError as error:
        raise WrongUse(str(error)) from error


def _check_accelerator(options: Options) -> int:
    try:
        report = accelerator_check.check_accelerator(
            options.output,
            60 * options.minutes,
            _num_emulated(options),
            installed_versions.find_versions(),
            say,
        )
    except OSError as error:
        raise WrongUse(f"The report cannot be written: {error}") from error
    write(json.dumps(report) if options.json else accelerator_report.format_report(report))
    say(f"Wrote {options.output} and {options.output.with_suffix('.txt')}.")
    return 0 if report["ok"] else 1


def _examine(options: Options) -> int:
    answers = examine(_num_emulated(options), options.processes, options.timeout_s)
    if options.report:
        write(examination_table.format_report(answers, installed_versions.format_versions()))
    elif options.json:
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
