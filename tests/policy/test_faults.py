"""The page of faults names tests that are there."""

import re

from places import ROOT


def test_each_test_of_the_page_of_faults_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/faults.md").read_text())
    assert len(named) > 25
    lost = [f"{file}::{name}" for file, name in named if not _has(file, name)]
    assert lost == []


def _has(file: str, name: str) -> bool:
    path = ROOT / file
    return path.exists() and f"\ndef {name}(" in path.read_text()
