"""A line that shows how far a long operation is, on terminals and in notebooks."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tpudist.display.notebook_cell import NotebookCell, in_notebook

_DELAY_S = 2.0  # shorter operations show nothing
_INTERVAL_S = 0.2


@contextlib.contextmanager
def show_on_terminal(text: str) -> Iterator[Callable[[str], None]]:
    """Shows a spinner, a text and its time on standard error, and removes them at the end.

    Yields:
        Function that replaces the text.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text)
        yield lambda changed: progress.update(task, description=changed)


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
        self._line = contextlib.ExitStack()
        self._show: Callable[[str], None] | None = None  # None as long as no line exists

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def advance(self, count: int = 1) -> None:
        """Counts finished things."""
        self._done += count
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _INTERVAL_S
            text = f"{self._label}: {self._done} of {self._total} {self._unit}"
            if self._show is None:
                self._show = self._open(text)
            self._show(text)

    def _open(self, text: str) -> Callable[[str], None]:
        if in_notebook():
            cell = NotebookCell(text)
            self._line.callback(cell.update, "")
            return cell.update
        if sys.stderr.isatty():
            return self._line.enter_context(show_on_terminal(text))
        return lambda _: None
