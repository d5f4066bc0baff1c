"""Progress of a plan: calls a callback, or shows one line on a terminal or in a notebook."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from tpudist.display.notebook_cell import NotebookCell, in_notebook
from tpudist.display.progress_line import show_on_terminal
from tpudist.planner.show.formats import format_seconds

# Called with the current activity, such as "compiling", and its seconds.
Progress = Callable[[str, float], None]


@contextlib.contextmanager
def show_progress(progress: Progress | None) -> Iterator[Progress]:
    """Returns the callback for progress: `progress`, or a callback that shows a line.

    The line disappears at the end. In a pipe or a log there is no line.
    """
    if progress is not None:
        yield progress
        return
    if in_notebook():
        line = _cell()
    else:
        line = _spinner() if sys.stderr.isatty() else contextlib.nullcontext(silent_progress)
    with line as report:
        yield report


def silent_progress(activity: str, seconds: float) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def _cell() -> Iterator[Progress]:
    cell = NotebookCell("planning")

    def report(activity: str, seconds: float) -> None:
        since = f", {format_seconds(seconds)}" if seconds >= 1 else ""
        cell.update(f"planning: {activity}{since}")

    try:
        yield report
    finally:
        cell.update("")


@contextlib.contextmanager
def _spinner() -> Iterator[Progress]:
    with show_on_terminal("planning") as show:
        yield lambda activity, _: show(f"planning: {activity}")
