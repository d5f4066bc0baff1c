"""Writes the results of docs/constructs.md: each construct with each kind of replicas.

    cd tests/child_programs && PYTHONPATH=../..:..:../shared python constructs_page.py

It trains all of them, which takes about ten minutes. Run it before a release, and after a change of
the compiled program. The tests train a share of them.
"""

from collections.abc import Mapping

import construct_cells
from construct_cells import GEOMETRIES, Cell
from constructs import CONSTRUCTS
from places import ROOT

PAGE = ROOT / "docs" / "constructs.md"
START = "<!-- Written by tests/child_programs/constructs_page.py. -->\n"
FOLD, END = "<details markdown>", "\n<!-- End of the written part. -->\n"


def table(found: Mapping[Cell, str]) -> str:
    """Returns the count, the exceptions, and the folded table with all cells."""
    kinds = {cell: told.partition(":")[0] for cell, told in found.items()}
    exact = list(kinds.values()).count("exact")
    lines = [
        f"\n**{exact} of {len(kinds)} combinations are exact**: {len(CONSTRUCTS)} constructs, each "
        f"with {len(GEOMETRIES)} kinds of replicas.",
    ]
    if exact < len(kinds):
        lines += ["", "| exception | replicas | result |", "|---|---|---|"]
    lines += [
        f"| {name} | {geometry} | {_without_places(told)} |"
        for (name, geometry), told in found.items()
        if kinds[name, geometry] != "exact"
    ]
    lines += ["", FOLD, "<summary>All combinations</summary>", ""]
    lines.append(f"| construct | {' | '.join(GEOMETRIES)} |")
    lines.append("|---" * (len(GEOMETRIES) + 1) + "|")
    for name in CONSTRUCTS:
        lines.append(f"| {name} | {' | '.join(kinds[name, g] for g in GEOMETRIES)} |")
    return "\n".join([*lines, "", "</details>"]) + "\n"


def with_table(page: str, found: Mapping[Cell, str]) -> str:
    """Returns the page with new results."""
    before, _, after = page.partition(START)
    return before + START + table(found) + after[after.index(END) :]


def read_table(page: str) -> dict[Cell, str]:
    """Returns the kind of each cell of the folded table: "exact", or another kind."""
    folded = page.partition(FOLD)[2].partition(END)[0]
    lines = [x for x in folded.splitlines() if x.startswith("| ")]
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
