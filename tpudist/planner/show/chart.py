"""A plan as a picture: a bar of memory, a bar of time, and the largest collectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpudist.display.text_tables import format_source
from tpudist.planner.show.figure import make_figure
from tpudist.planner.show.formats import format_bytes, format_seconds
from tpudist.planner.show.plan_text import describe_plan
from tpudist.planner.show.report_parts import (
    GREEN,
    MEMORY,
    NETWORK_COLORS,
    RED,
    SPEED,
    STEP_TIME,
    TEAL,
    Bars,
)
from tpudist.planner.show.speed_text import merge_uses
from tpudist.xla.estimate.collective_traffic import CollectiveUse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tpudist.planner.plan_figures import PlanFigures

NUM_COLLECTIVES = 6
# Inches. A SECTION is a bar with its heading and its legend; a ROW is one collective.
WIDTH, MARGIN, TOP, SECTION, BAR, ROW = 9.0, 0.3, 1.1, 1.25, 0.36, 0.27
TITLE_TOP, FACTS_TOP = 0.2, 0.53
HEADING = 0.24  # from a heading to its bar
SPACE = 0.5  # for the heading and the margin of the collectives
NAMES = 2.3
"""Inches for the names of collectives, left of their bars."""


def draw(plan: PlanFigures, path: str | Path) -> None:
    """Writes a picture in the format of the suffix of `path`, such as .png or .svg.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If matplotlib does not know the format.
    """
    report = describe_plan(plan)
    bars = [section for section in report.sections if isinstance(section, Bars)]
    uses = merge_uses(plan.collectives)[:NUM_COLLECTIVES]
    height = TOP + SECTION * len(bars) + (SPACE + ROW * len(uses) if uses else 0.0)
    figure = make_figure(WIDTH, height)

    def add_axes(top: float, tall: float, left: float = MARGIN) -> Axes:
        # matplotlib counts fractions from the bottom; these are inches from the top.
        box = (left / WIDTH, 1 - (top + tall) / height, (WIDTH - MARGIN - left) / WIDTH)
        axes = figure.add_axes((*box, tall / height))
        axes.set_axis_off()
        return axes

    def write(text: str, top: float, **style: Any) -> None:
        figure.text(MARGIN / WIDTH, 1 - top / height, text, va="top", **style)

    color = GREEN if report.fits else RED
    write(report.title, TITLE_TOP, fontsize=14, fontweight="bold", color=color)
    facts = dict(report.facts)
    lines = ([MEMORY], [STEP_TIME, SPEED])
    text = "\n".join("   |   ".join(facts[x] for x in names if x in facts) for names in lines)
    write(text, FACTS_TOP, fontsize=9.5, color="0.25")
    for i, section in enumerate(bars):
        top = TOP + SECTION * i
        write(section.title, top, fontsize=9.5, fontweight="bold", color="0.15")
        _draw_bar(add_axes(top + HEADING, BAR), section)
    if uses:
        top = TOP + SECTION * len(bars)
        timed = any(use.seconds for use in uses)
        pale = " (pale: hidden behind computation)" if timed else ""
        write(f"Communication per step{pale}", top, fontsize=9.5, fontweight="bold", color="0.15")
        _draw_collectives(add_axes(top + HEADING, ROW * len(uses), NAMES), uses, timed)
    figure.savefig(path)


def _draw_bar(axes: Axes, bars: Bars) -> None:
    begin = 0.0
    for part in bars.parts:
        label = f"{part.name} {part.text}"
        axes.barh(0, part.amount, left=begin, height=1, color=part.color, label=label)
        begin += part.amount
    if bars.free:
        label = f"{bars.free.name} {bars.free.text}"
        axes.barh(0, bars.free.amount, left=begin, height=1, color="0.9", label=label)
    end = bars.whole or 1.0
    if bars.error_bar:
        low, high = bars.error_bar
        to_ends = [[max(0.0, begin - low)], [max(0.0, high - begin)]]
        axes.errorbar([begin], [0], xerr=to_ends, color="0.15", capsize=4, linewidth=1.2)
        end = max(end, 1.01 * high)
    axes.set_xlim(0, end)
    axes.set_ylim(-0.5, 0.5)
    if not bars.parts:
        return
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, -0.05),
        borderaxespad=0,
        borderpad=0.3,
        ncols=4,
        frameon=False,
        fontsize=8.5,
        handlelength=0.8,
        handleheight=0.8,
        handletextpad=0.5,
        columnspacing=1.8,
    )


def _draw_collectives(axes: Axes, uses: Sequence[CollectiveUse], timed: bool) -> None:
    amounts = [use.seconds if timed else use.sent_bytes for use in uses]
    for row, (use, amount) in enumerate(zip(uses, amounts, strict=True)):
        color = NETWORK_COLORS.get(use.network, TEAL)
        axes.barh(row, amount, color=color, alpha=0.35 if timed else 1, height=0.7)
        if timed:
            axes.barh(row, use.exposed_s, color=color, height=0.7)
        text = format_seconds(amount) if timed else format_bytes(amount)
        line = f"   {format_source(use.source)}" if use.source else ""
        axes.annotate(
            text + line,
            (amount, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color="0.3",
        )
        axes.text(
            -0.012,
            row,
            f"{use.kind}, {' '.join(use.axes)} ({use.network.upper()})",
            ha="right",
            va="center",
            fontsize=8.5,
            transform=axes.get_yaxis_transform(),
        )
    # Space for the text right of the longest bar; 1e-12 for a chart of zeros.
    axes.set_xlim(0, 1.6 * max(*amounts, 1e-12))
    axes.set_ylim(len(uses) - 0.5, -0.5)
