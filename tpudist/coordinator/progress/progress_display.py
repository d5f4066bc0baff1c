"""Displays of samples: in place on a terminal or below a notebook cell, otherwise line by line."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Protocol

from tpudist.coordinator.progress.progress_sample import ProgressSample
from tpudist.coordinator.progress.progress_text import format_line
from tpudist.display.notebook_cell import NotebookCell, in_notebook

if TYPE_CHECKING:
    from rich.console import Console

LINE_S = 10.0
"""Seconds between two lines, where no table can be redrawn."""
CELL_WIDTH = 100
"""Width of the table in a notebook, which does not report its own."""


class ProgressDisplay(Protocol):
    """Shows one sample after the other."""

    def show(self, sample: ProgressSample) -> None:
        """Shows a sample in place of the last one, or below it."""
        ...

    def close(self, sample: ProgressSample | None) -> None:
        """Shows a last sample, which stays, and releases the terminal."""
        ...


def make_progress_display(file: IO[str] | None = None) -> ProgressDisplay:
    """Returns the display for `file`; by default for the notebook, or for standard error."""
    if file is None and in_notebook():
        return _CellDisplay()
    from rich.console import Console

    console = Console(file=sys.stderr if file is None else file, highlight=False)
    is_redrawn = console.is_terminal and not console.is_dumb_terminal
    return _TerminalDisplay(console) if is_redrawn else _LineDisplay(console.file)


def format_page(sample: ProgressSample) -> str:
    """Returns the whole table as text."""
    from tpudist.coordinator.progress.progress_table import format_table

    return format_table(sample, CELL_WIDTH)


class _TerminalDisplay:
    """Redraws the table below what the program prints."""

    def __init__(self, console: Console):
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, sample: ProgressSample) -> None:
        from tpudist.coordinator.progress.progress_table import make_page

        # Terminals wrap a line of their full width, and scroll after the last line.
        width, height = self._console.size
        self._live.update(make_page(sample, width - 1, height - 1), refresh=True)

    def close(self, sample: ProgressSample | None) -> None:
        try:
            if sample is not None:
                self.show(sample)
        finally:
            self._live.stop()


class _CellDisplay:
    """Redraws the table below a cell of a notebook."""

    def __init__(self):
        self._cell = NotebookCell()

    def show(self, sample: ProgressSample) -> None:
        self._cell.update(format_page(sample))

    def close(self, sample: ProgressSample | None) -> None:
        if sample is not None:
            self.show(sample)


class _LineDisplay:
    """Prints a line at the start, every `LINE_S` and at the end."""

    def __init__(self, file: IO[str]):
        self._file = file
        self._next_s = 0.0

    def show(self, sample: ProgressSample) -> None:
        if sample.elapsed_s >= self._next_s:
            self._next_s = sample.elapsed_s + LINE_S
            self._print(sample)

    def close(self, sample: ProgressSample | None) -> None:
        if sample is not None:
            self._print(sample)

    def _print(self, sample: ProgressSample) -> None:
        print(f"tpudist: {format_line(sample)}", file=self._file, flush=True)
