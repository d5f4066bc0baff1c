"""Tables for terminals, notebooks and plain text.

`print` writes a `TextTable` as aligned plain text, rich prints it on a terminal of any width, and
a notebook shows its HTML. Cells are plain text: rich's markup and HTML in them have no effect.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # `import tpudist` must not load rich, so functions import it when they use it.
    from rich.console import Console, ConsoleOptions, RenderResult

WIDE = 98
"""Columns at which a terminal shows every column: 100, less the indent of a plan's sections."""

# Text inherits its color from the page, and other colors are half transparent, so the table is
# readable on light and dark pages. `all: revert` undoes the styles that notebooks give all tables.
STYLE = """
.tpudist-table { font-size: 0.9rem; line-height: 1.4; max-width: 70rem; overflow-x: auto; }
.tpudist-table .title { font-weight: 600; margin-bottom: 0.3rem; white-space: pre-line; }
.tpudist-table .note { opacity: 0.65; margin-top: 0.3rem; }
.tpudist-table table { all: revert; border-collapse: collapse; color: inherit; font-size: inherit; }
.tpudist-table table tr { all: revert; background: none !important; }
.tpudist-table table td, .tpudist-table table th { all: revert; padding: 0.1rem 1.1rem 0.1rem 0;
  text-align: left; vertical-align: top; color: inherit; }
.tpudist-table table th { font-weight: 400; opacity: 0.65; }
.tpudist-table table .number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tpudist-table table .short { white-space: nowrap; }
"""


@dataclasses.dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        name: Heading.
        is_number: Whether to align cells to the right, and never to break them.
        is_short: Whether never to break cells over lines.
        only_wide: Whether terminals of fewer than `WIDE` columns omit it.
        is_source: Whether cells have the form "file:line"; long paths are shortened.
        style: Style of the cells in rich's words, such as "bold".
    """

    name: str = ""
    is_number: bool = False
    is_short: bool = False
    only_wide: bool = False
    is_source: bool = False
    style: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """Cell with its own style in rich's words; a cell without one is a `str`."""

    text: str
    style: str = ""

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class TextTable:
    """Table with a title above and notes below.

    Attributes:
        columns: Columns, left to right; a `str` is the heading of a column of text.
        rows: Cells `[row][column]`; all rows have a cell for each column.
        title: Line or lines above the table.
        notes: Lines below the table, such as a count of the rows that were left out.
        has_header: Whether to show the headings.
    """

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    notes: Sequence[str] = ()
    has_header: bool = True

    def __str__(self) -> str:
        columns = self._columns()
        rows = [[x.name for x in columns]] if self.has_header else []
        rows += [[str(cell) for cell in row] for row in self.rows]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if column.is_number else cell.ljust(width)
                for column, cell, width in zip(columns, row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*([self.title] if self.title else []), *lines, *self.notes])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        is_wide = options.max_width >= WIDE
        shown = [(i, x) for i, x in enumerate(self._columns()) if is_wide or not x.only_wide]
        table = Table(
            box=None,
            padding=(0, 2, 0, 0),
            pad_edge=False,
            header_style="dim",
            show_header=self.has_header,
        )
        for _, column in shown:
            table.add_column(
                Text(column.name),
                justify="right" if column.is_number else "left",
                no_wrap=column.is_number or column.is_short,
                overflow="fold",
                style=column.style,
            )
        for row in self.rows:
            cells = []
            for i, column in shown:
                cell, text = row[i], str(row[i])
                if column.is_source:
                    text = format_source(text, num_parts=2 if is_wide else 1)
                cells.append(Text(text, style=cell.style if isinstance(cell, Cell) else ""))
            table.add_row(*cells)
        if self.title:
            # Not the title of rich's table, which breaks at the width of the table.
            yield Text(self.title, style="bold")
        yield table
        for note in self.notes:
            yield Text(note, style="dim")

    def _repr_html_(self) -> str:
        return self.format_html(STYLE)

    def format_html(self, style: str = "") -> str:
        """Returns a `div`; without a `style`, the page must contain `STYLE`."""
        columns = self._columns()
        head = "".join(f'<th class="{_css_class(x)}">{escape(x.name)}</th>' for x in columns)
        body = f"<tr>{head}</tr>" if self.has_header else ""
        for row in self.rows:
            cells = (_html_cell(x, str(cell)) for x, cell in zip(columns, row, strict=True))
            body += f"<tr>{''.join(cells)}</tr>"
        parts = [f"<style>{style}</style>"] if style else []
        parts += [f'<div class="title">{escape(self.title)}</div>'] if self.title else []
        parts.append(f"<table><tbody>{body}</tbody></table>")
        parts += [f'<div class="note">{escape(note)}</div>' for note in self.notes]
        return f'<div class="tpudist-table">{"".join(parts)}</div>'

    def _columns(self) -> list[Column]:
        return [x if isinstance(x, Column) else Column(x) for x in self.columns]


def format_source(source: str | None, num_parts: int = 2) -> str:
    """Returns a source line "/long/path/models/transformer.py:142" as "models/transformer.py:142".

    Args:
        source: "file:line"; None or "" for an unknown line, which stays empty.
        num_parts: Number of parts of the path to keep, from the end.
    """
    if not source:
        return ""
    path, _, line = source.rpartition(":")
    return f"{Path(*Path(os.path.normpath(path)).parts[-num_parts:])}:{line}"


def _html_cell(column: Column, text: str) -> str:
    if column.is_source and text:
        code = f"<code>{escape(format_source(text))}</code>"
        return f'<td class="short" title="{escape(text)}">{code}</td>'
    return f'<td class="{_css_class(column)}">{escape(text)}</td>'


def _css_class(column: Column) -> str:
    if column.is_number:
        return "number"
    return "short" if column.is_short or column.is_source else ""
