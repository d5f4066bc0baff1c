"""`tpudist doctor`: checks of this machine and its accelerators, and the time of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from tpudist.cli import installed_versions, option_types
from tpudist.cli.console import print_message, print_parts, print_text
from tpudist.cli.errors import WrongUse, as_wrong_use

EPILOG = """
examples:
  tpudist doctor
  tpudist doctor --accelerator
  tpudist doctor runs/latest

exit codes: 0 all checks passed, 1 a check failed, 2 wrong use
"""


@dataclass(frozen=True)
class Options:
    """Check this machine or its accelerators, or explain the time of a run."""

    run: Annotated[tyro.conf.Positional[str | None], option_types.value_name(metavar="[RUN]")] = (
        None
    )
    """Folder of a run with records of tpudist.record_goodput (default: check this machine)."""
    accelerator: tyro.conf.FlagCreatePairsOff[bool] = False
    """Check numbers and measure speed on the devices of this host; write a report."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("accelerator_report.json")
    """With --accelerator: file of the report; its text has the suffix .txt."""
    minutes: Annotated[float, tyro.conf.arg(metavar="MINUTES")] = 10.0
    """With --accelerator: time limit."""
    report: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print versions, devices and checks as Markdown, for a bug report."""
    emulate: option_types.Count = None
    """Number of emulated CPU devices (default: use the devices of this host)."""
    processes: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Number of local processes to connect, with --emulate devices each, or 2."""
    timeout_s: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 60.0
    """Time limit for devices and processes to start and compute."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the result as JSON."""


def run(options: Options) -> int:
    """Prints the checks, or the phases and delays of a run; returns the exit code."""
    if options.run is None:
        _check_numbers(options)
        _check_effects(options)
        return _check_accelerator(options) if options.accelerator else _examine(options)
    # Everything but the folder has its default: the other options are for a machine, not for a run.
    if options != Options(run=options.run):
        raise WrongUse("The options are for checks of this machine. Omit them, or omit the folder.")
    from tpudist.cli.diagnosis_table import describe_diagnosis
    from tpudist.goodput.diagnosis import diagnose
    from tpudist.goodput.run_history import NoRecords, read_run

    with as_wrong_use(NoRecords):
        diagnosis = diagnose(read_run(options.run))
    print_parts(*describe_diagnosis(diagnosis))
    return 0


def _check_numbers(options: Options) -> None:
    chosen = _by_flag(options)
    for flag, least in (("emulate", 1), ("processes", 1), ("timeout-s", 1), ("minutes", 0.1)):
        value = chosen[flag]
        if value is not None and not value >= least:  # `not >=` also rejects NaN
            raise WrongUse(f"--{flag} {value}: it must be at least {least}.")


def _check_effects(options: Options) -> None:
    # An option that has no effect is an error: the user expects an effect.
    chosen, defaults = _by_flag(options), _by_flag(Options())
    if options.accelerator:
        ignored = ("report", "processes", "timeout-s")
        remedy = "Omit it, or omit --accelerator"
    else:
        ignored = ("output", "minutes", *(["json"] if options.report else []))
        remedy = "Omit it, or omit --report" if options.report else "Omit it, or add --accelerator"
    for flag in ignored:
        if chosen[flag] != defaults[flag]:
            other = "--accelerator" if options.accelerator else "this check"
            raise WrongUse(f"--{flag} has no effect on {other}. {remedy}.")


def _by_flag(options: Options) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in vars(options).items()}


def _num_emulated(options: Options) -> int | None:
    from tpudist.xla import emulation

    with as_wrong_use(ValueError):
        return options.emulate or emulation.devices_of_environment()


def _check_accelerator(options: Options) -> int:
    print_message(f"Checking accelerators, at most {options.minutes:g} minutes.")
    from tpudist.cli.accelerator import accelerator_check, accelerator_report

    try:
        report = accelerator_check.check_accelerator(
            options.output,
            60 * options.minutes,
            _num_emulated(options),
            installed_versions.find_versions(),
            print_message,
        )
    except OSError as error:
        raise WrongUse(f"The report cannot be written: {error}") from error
    print_text(json.dumps(report) if options.json else accelerator_report.format_report(report))
    print_message(f"Wrote {options.output} and {options.output.with_suffix('.txt')}.")
    return 0 if report["ok"] else 1


def _examine(options: Options) -> int:
    # `examine` ends within 30 s more than the limit of the programs that it starts.
    print_message(f"Checking this machine, at most {options.timeout_s + 30:g} s.")
    from tpudist.cli import examination_table
    from tpudist.supervisor.doctor.examination import examine, is_well

    answers = examine(_num_emulated(options), options.processes, options.timeout_s)
    if options.report:
        print_text(examination_table.format_report(answers, installed_versions.format_versions()))
    elif options.json:
        print_text(examination_table.to_json(answers))
    else:
        print_parts(*examination_table.describe_answers(answers))
        details = examination_table.format_details(answers)
        if details:
            print_text(details)
    return 0 if is_well(answers) else 1
