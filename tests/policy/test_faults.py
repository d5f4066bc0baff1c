"""The page of fault tolerance lists faults, and an existing test of each."""

import re

from places import ROOT


def test_each_fault_of_the_page_has_a_test_that_exists():
    text = (ROOT / "docs/fault_tolerance.md").read_text()
    faults, tests = (_read_rows(text, x) for x in ("| fault | what happens |", "| fault | test |"))
    assert len(faults) > 25
    assert list(faults) == list(tests)
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", x) for x in tests.values()]
    assert all(named)
    assert [f"{file}::{name}" for x in named for file, name in x if not _has(file, name)] == []


def _read_rows(text: str, heading: str) -> dict[str, str]:
    table = text[text.index(heading) :].split("\n\n")[0]
    rows = (x.strip("| ").split(" | ") for x in table.splitlines()[2:])
    return {fault: rest for fault, rest in rows}


def _has(file: str, name: str) -> bool:
    path = ROOT / file
    return path.exists() and f"\ndef {name}(" in path.read_text()
