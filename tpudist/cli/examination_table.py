"""The result of `tpudist doctor` for a machine: as a table, as JSON and as a bug report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from tpudist.cli.console import hide_home
from tpudist.display.text_tables import Cell, Column, TextTable
from tpudist.supervisor.doctor.checks import Answer, Verdict
from tpudist.supervisor.doctor.examination import is_well

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAIL: "bold red"}


def describe_answers(answers: Sequence[Answer]) -> list[TextTable | str]:
    """Returns a table with a row per answer, the remedies, and the number of failures."""
    columns = (Column(is_short=True), Column("check", is_short=True), "result")
    rows = [(Cell(x.verdict.value, _STYLES[x.verdict]), x.asked, x.found) for x in answers]
    table = TextTable(columns, rows)
    counts = {verdict: sum(x.verdict is verdict for x in answers) for verdict in Verdict}
    warnings = (
        "1 warning" if counts[Verdict.WARNING] == 1 else f"{counts[Verdict.WARNING]} warnings"
    )
    return [table, *_remedies(answers), f"\n{counts[Verdict.FAIL]} failed, {warnings}."]


def format_details(answers: Sequence[Answer]) -> str:
    """Returns the output of failed checks; "" if there is none."""
    return "\n".join(f"\n{x.asked}:\n{x.details.rstrip()}" for x in answers if x.details)


def to_json(answers: Sequence[Answer]) -> str:
    """Returns the answers as JSON, for programs."""
    rows = [dataclasses.asdict(x) | {"verdict": x.verdict.value} for x in answers]
    return json.dumps({"ok": is_well(answers), "checks": rows}, indent=2)


def format_report(answers: Sequence[Answer], versions: str) -> str:
    """Returns versions and answers as Markdown, to paste into a bug report."""
    rows = [f"- {x.verdict.value}: {x.asked}: {' '.join(x.found.split())}" for x in answers]
    details = [f"\n{x.asked}:\n\n```text\n{x.details.rstrip()}\n```" for x in answers if x.details]
    text = "\n".join([f"Versions: {versions}", "", *rows, *details])
    return hide_home(text)


def _remedies(answers: Sequence[Answer]) -> list[TextTable | str]:
    # Failures before warnings. The sort is stable, so the checks keep their order otherwise.
    failed = sorted((x for x in answers if x.remedy), key=lambda x: x.verdict is not Verdict.FAIL)
    if not failed:
        return []
    rows = [(x.asked, x.remedy) for x in failed]
    return ["\nWhat to do:", TextTable((Column(is_short=True), ""), rows, has_header=False)]
