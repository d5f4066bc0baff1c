"""Writes the table of docs/constructs.md: what becomes of each construct on each geometry.

    cd tests/child_programs && PYTHONPATH=../..:..:../shared python constructs_page.py

It trains all of them, which takes some ten minutes: before a release, and after a change of what
is compiled. The tests train a share of them.
"""

from collections.abc import Mapping

import construct_cells
from construct_cells import GEOMETRIES, Cell
from constructs import CONSTRUCTS
from places import ROOT

PAGE = ROOT / "docs" / "constructs.md"
START = "<!-- The rest is written by tests/child_programs/constructs_page.py. -->\n"


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


def read_table(page: str) -> dict[Cell, str]:
    """What the page's table says of each cell: "exact", or another kind."""
    lines = [x for x in page.partition(START)[2].splitlines() if x.startswith("| ")]
    rows = [[x.strip() for x in line.strip("| ").split(" | ")] for line in lines]
    geometries = rows[0][1:]
    return {
        (row[0], geometry): kind
        for row in rows[1:]
        for geometry, kind in zip(geometries, row[1:], strict=True)
    }


def _without_places(told: str) -> str:
    return told.replace(f"{ROOT}/", "")


if __name__ == "__main__":
    cells = [(name, geometry) for name in CONSTRUCTS for geometry in GEOMETRIES]
    PAGE.write_text(with_table(PAGE.read_text(), construct_cells.run_cells(cells)))
