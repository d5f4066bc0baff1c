"""Writes the table of docs/constructs.md: what becomes of each construct on each geometry.

    cd tests/programs && PYTHONPATH=../..:.. python constructs_page.py

It trains all of them, which takes some minutes.
"""

from collections.abc import Mapping

import construct_cells
from construct_cells import GEOMETRIES, Cell
from constructs import CONSTRUCTS
from places import ROOT

PAGE = ROOT / "docs" / "constructs.md"
START = "<!-- The rest is written by tests/programs/constructs_page.py. -->\n"


def table(found: Mapping[Cell, str]) -> str:
    """Counts, a row for each construct, and what the refusals say."""
    kinds = {cell: told.partition(":")[0] for cell, told in found.items()}
    counts = [f"{list(kinds.values()).count(k)} {k}" for k in dict.fromkeys(kinds.values())]
    lines = [f"\n{len(kinds)} cells: {', '.join(counts)}.\n"]
    lines.append(f"| construct | {' | '.join(GEOMETRIES)} |")
    lines.append("|---" * (len(GEOMETRIES) + 1) + "|")
    for name in CONSTRUCTS:
        lines.append(f"| {name} | {' | '.join(kinds[name, g] for g in GEOMETRIES)} |")
    lines.append("")
    for (name, geometry), told in found.items():
        if kinds[name, geometry] != "exact":
            lines.append(f"- {name}, on {geometry}: {_without_places(told)}")
    return "\n".join(lines) + "\n"


def with_table(page: str, found: Mapping[Cell, str]) -> str:
    """The page, with the table of now."""
    return page.partition(START)[0] + START + table(found)


def _without_places(told: str) -> str:
    return told.replace(f"{ROOT}/", "")


if __name__ == "__main__":
    cells = [(name, geometry) for name in CONSTRUCTS for geometry in GEOMETRIES]
    PAGE.write_text(with_table(PAGE.read_text(), construct_cells.run_cells(cells)))
