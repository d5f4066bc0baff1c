"""A plan or a search on a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tpudist.display.text_tables import TextTable
from tpudist.planner.show.report_parts import Bars, Lines, Part, Report

_TEXT_WIDTH = 100  # of `print(plan)`; `rich.print` uses the width of the terminal
_NUM_BOLD = 3  # facts: memory, step time and speed, as in `html`


class TerminalReport:
    """Report that rich prints; the layout depends on the width of the terminal."""

    def __init__(self, report: Report):
        self._report = report

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        color = "green" if self._report.fits else "red"
        yield Panel(
            _facts(self._report.facts),
            title=Text(f" {self._report.title} ", style=f"bold {color}"),
            title_align="left",
            border_style=color,
            box=box.ASCII if options.ascii_only else box.ROUNDED,
            padding=(0, 1),
        )
        for section in self._report.sections:
            yield Text(f"\n{section.title}", style="bold")
            yield Padding(_section(section), (0, 0, 0, 2))


def format_plain(result: RenderableType) -> str:
    """Returns a plan or the result of a search as text without colors."""
    console = Console(width=_TEXT_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(result)
    return capture.get()


def _facts(facts: tuple[tuple[str, str], ...]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for i, (name, value) in enumerate(facts):
        grid.add_row(name, Text(value, style="bold" if i < _NUM_BOLD else ""))
    return grid


def _section(section: Bars | TextTable | Lines) -> RenderableType:
    if isinstance(section, Bars):
        return _bars(section)
    if isinstance(section, TextTable):
        return dataclasses.replace(section, title="")
    return _lines(section.lines)


def _bars(bars: Bars) -> RenderableType:
    # One line per part, in which the part begins where the previous one ends: the lines together
    # are the bar, and each has its name next to it.
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(ratio=1)
    begin = 0.0
    for part in bars.parts:
        grid.add_row(part.name, part.text, part.share, _Piece(part, begin, bars.whole))
        begin += part.amount
    if free := bars.free:
        grid.add_row(*(Text(x, style="dim") for x in (free.name, free.text, free.share)))
    return Group(grid, _lines(bars.lines)) if bars.lines else grid


class _Piece:
    """Part of a bar, at its place in the width that the terminal leaves."""

    def __init__(self, part: Part, begin: float, whole: float):
        self._part, self._begin, self._whole = part, begin, whole or 1.0

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        end = self._begin + self._part.amount
        if options.ascii_only:
            cells = options.max_width / self._whole
            # Rounded ends, not lengths, so that rows join without gaps; at least one character is
            # visible.
            first, last = round(self._begin * cells), round(end * cells)
            yield Text(" " * first + "#" * max(1, last - first), no_wrap=True)
        else:
            yield Bar(self._whole, self._begin, end, color=self._part.color)


def _lines(lines: tuple[str, ...]) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", Text(line))
    return grid
