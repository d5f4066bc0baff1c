"""The picture of a choice between slices: days of a run against its cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpudist.planner.show.figure import make_figure
from tpudist.planner.show.report_parts import GREEN, TEAL


def draw(
    points: Sequence[tuple[float, float, str]],
    front: Sequence[tuple[float, float, str]],
    days: float,
    unit: str,
    path: str | Path,
) -> None:
    """Writes a picture in the format of the suffix of `path`, such as .png or .svg.

    The points are the days, the cost and the slice of each choice; no other is both faster and
    cheaper than those of the front. The run may take `days`, and `unit` is the name of the cost.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If matplotlib does not know the format.
    """
    figure = make_figure(7.0, 4.2)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o", color=TEAL, alpha=0.5)
    axes.plot([x for x, _, _ in front], [y for _, y, _ in front], "o-", color=GREEN)
    for x, y, name in front:
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.axvline(days, linestyle="--", linewidth=1, color="gray")
    axes.set_xlabel(f"days of the run (dashed: {days:g})")
    axes.set_ylabel(unit)
    figure.tight_layout()
    figure.savefig(path)
