"""A line that shows how far a long operation is, on terminals and in notebooks."""

import sys
import time

from tpudist.display.notebook_cell import NotebookCell, in_notebook

_DELAY_S = 2.0  # shorter operations show nothing
_INTERVAL_S = 0.2


class ProgressLine:
    """Shows `label: 3 of 10 arrays` from the third second on, and removes it at the end.

    It shows nothing if the output is neither a terminal nor a notebook.

    Args:
        label: Name of the operation.
        total: Number of things to do.
        unit: Word for the things.
    """

    def __init__(self, label: str, total: int, unit: str):
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._next_s = time.monotonic() + _DELAY_S
        self._cell: NotebookCell | None = None
        self._width = 0  # of the text on the terminal

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._cell is not None:
            self._cell.update("")
        elif self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            sys.stderr.flush()

    def advance(self, count: int = 1) -> None:
        """Counts finished things."""
        self._done += count
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _INTERVAL_S
            self._show(f"{self._label}: {self._done} of {self._total} {self._unit}")

    def _show(self, text: str) -> None:
        if self._cell is not None:
            self._cell.update(text)
        elif in_notebook():
            self._cell = NotebookCell(text)
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r{text.ljust(self._width)}")
            sys.stderr.flush()
            self._width = max(self._width, len(text))
