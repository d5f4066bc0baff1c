"""Says what is being done while a plan is made: to a callback, on a terminal or in a notebook."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from tpudist.display.notebook_cell import NotebookCell, in_notebook
from tpudist.planner.show.words import format_seconds

# Called with what is being done, and for how many seconds.
Progress = Callable[[str, float], None]


@contextlib.contextmanager
def show_progress(progress: Progress | None) -> Iterator[Progress]:
    """What to tell progress to: `progress`, or a line that a terminal or a notebook shows.

    The line is gone at the end. In a pipe or a log there is none.
    """
    if progress is not None:
        yield progress
        return
    if in_notebook():
        line = _cell()
    else:
        line = _spinner() if sys.stderr.isatty() else contextlib.nullcontext(_ignore)
    with line as tell:
        yield tell


def _ignore(doing: str, seconds: float) -> None:
    """Tells nobody."""


@contextlib.contextmanager
def _cell() -> Iterator[Progress]:
    cell = NotebookCell("planning")

    def report(doing: str, seconds: float) -> None:
        since = f", {format_seconds(seconds)}" if seconds >= 1 else ""
        cell.update(f"planning: {doing}{since}")

    try:
        yield report
    finally:
        cell.update("")


@contextlib.contextmanager
def _spinner() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning")

        def report(doing: str, seconds: float) -> None:
            bar.update(task, description=f"planning: {doing}")

        yield report
