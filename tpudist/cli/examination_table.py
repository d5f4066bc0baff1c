"""What the doctor has found of this machine, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tpudist.cli.console import make_table
from tpudist.supervisor.doctor.checks import Answer, Verdict
from tpudist.supervisor.doctor.examination import is_well

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAIL: "bold red"}


def draw_answers(answers: Sequence[Answer]) -> list[Any]:
    """A row for each answer, then what is to be done."""
    table = make_table()
    for name in ("", "check"):
        table.add_column(name, no_wrap=True)
    table.add_column("result", overflow="fold")
    for x in answers:
        verdict = Text(x.verdict.value, style=_STYLES[x.verdict])
        table.add_row(verdict, x.asked, Text(x.found))
    counts = {v: sum(x.verdict is v for x in answers) for v in Verdict}
    warnings = (
        "1 warning" if counts[Verdict.WARNING] == 1 else f"{counts[Verdict.WARNING]} warnings"
    )
    return [table, *_remedies(answers), Text(f"\n{counts[Verdict.FAIL]} failed, {warnings}.")]


def format_details(answers: Sequence[Answer]) -> str:
    """What was printed by what has failed, with its lines whole; "" if nothing was."""
    return "\n".join(f"\n{x.asked}:\n{x.details.rstrip()}" for x in answers if x.details)


def to_json(answers: Sequence[Answer]) -> str:
    """The same for programs."""
    rows = [dataclasses.asdict(x) | {"verdict": x.verdict.value} for x in answers]
    return json.dumps({"ok": is_well(answers), "checks": rows}, indent=2)


def format_report(answers: Sequence[Answer], versions: str) -> str:
    """Returns versions and answers as Markdown, to paste into a bug report."""
    rows = [f"- {x.verdict.value}: {x.asked}: {' '.join(x.found.split())}" for x in answers]
    details = [f"\n{x.asked}:\n\n```text\n{x.details.rstrip()}\n```" for x in answers if x.details]
    text = "\n".join([f"Versions: {versions}", "", *rows, *details])
    return text.replace(str(Path.home()), "~")


def _remedies(answers: Sequence[Answer]) -> list[Table | Text]:
    bad = [x for x in answers if x.remedy]
    if not bad:
        return []
    table = make_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for x in sorted(bad, key=lambda x: x.verdict is not Verdict.FAIL):
        table.add_row(x.asked, Text(x.remedy))
    return [Text("\nWhat to do:"), table]
