"""Runs all sections, and keeps the report on the disk up to date after each of them."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tpudist.cli.accelerator.accelerator_report import build_report, write_report
from tpudist.cli.accelerator.section_run import run_section
from tpudist.xla import emulation

SHARES = {"numbers": 0.4, "compute": 0.2, "collectives": 0.25, "host": 0.15}
"""Rough share of the time that each section may take, in the order in which they run.

The numbers compile the most programs. A section that ends early does not give its time to the next
one, so that the result of one section never depends on another.
"""


def check_accelerator(
    path: Path,
    budget_s: float,
    num_emulated: int | None,
    versions: Mapping[str, str],
    report_line: Callable[[str], None],
) -> dict[str, Any]:
    """Checks and measures the devices of this host, and returns the report.

    Args:
        path: File of the report as JSON; its text is written to the same name with .txt.
        budget_s: Seconds for all sections together.
        num_emulated: Number of emulated CPU devices, or None for the devices of this host.
        versions: Version of each package, for the report.
        report_line: Called with a line of progress.

    Raises:
        OSError: If the report cannot be written.
    """
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results: list[dict[str, Any]] = []
    report = build_report(results, versions, created)
    write_report(report, path)  # raises now, not after ten minutes, if the file cannot be written
    for name, share in SHARES.items():
        report_line(f"{name}: at most {share * budget_s:.0f} s")
        section = run_section(
            name,
            share * budget_s,
            _environment(num_emulated),
            lambda item: report_line(f"  {item}"),
            minutes=budget_s / 60,
        )
        # `is_ok` is a property, so `asdict` omits it.
        results.append({**dataclasses.asdict(section), "ok": section.is_ok})
        report = build_report(results, versions, created)
        write_report(report, path)
    return report


def _environment(num_emulated: int | None) -> dict[str, str]:
    # libtpu and XLA log to standard error, and the report quotes the last lines of a child that
    # died. Level 3 leaves fatal messages of libtpu, level 2 errors of XLA.
    quiet = {"TPU_STDERR_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if num_emulated:
        return {**quiet, **emulation.environment_of(num_emulated)}
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        quiet["JAX_PLATFORMS"] = f"{platforms},cpu"  # the CPU computes the expected numbers
    return quiet
