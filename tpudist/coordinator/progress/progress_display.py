"""Where samples of a run are shown: in place on a terminal or below a cell, else line by line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import IO, Any, Protocol

from tpudist.coordinator.progress.progress_sample import ProgressSample
from tpudist.coordinator.progress.progress_table import Line, describe_sample, table_lines

LINE_S = 10.0
"""After how many seconds there is a new line where none can be drawn anew."""
CELL_WIDTH = 100
"""Of the table in a notebook, which does not say how wide it is."""
_STYLES = {"text": "", "head": "bold", "row": "", "alarm": "yellow"}


class ProgressDisplay(Protocol):
    """Shows one sample after the other."""

    def show(self, sample: ProgressSample) -> None:
        """Shows a sample in the place of the last one, or after it."""
        ...

    def close(self, sample: ProgressSample | None) -> None:
        """Shows the last sample, which stays."""
        ...


def make_progress_display(file: IO[str] | None = None) -> ProgressDisplay:
    """The display for `file`; by default for a notebook, or for what standard error is."""
    if file is None and _in_notebook():
        return _CellDisplay()
    from rich.console import Console  # only where it is used: it takes time to import

    console = Console(file=sys.stderr if file is None else file, highlight=False)
    is_drawn = console.is_terminal and not console.is_dumb_terminal
    return _TerminalDisplay(console) if is_drawn else _LineDisplay(console.file)


def table_text(sample: ProgressSample, width: int = CELL_WIDTH) -> str:
    """The whole table."""
    return "\n".join(line.text for line in table_lines(sample, width))


class _TerminalDisplay:
    """Draws the table anew, below what the program prints."""

    def __init__(self, console: Any):
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, sample: ProgressSample) -> None:
        width, height = self._console.size
        self._live.update(_style(table_lines(sample, width - 1, height - 1)), refresh=True)

    def close(self, sample: ProgressSample | None) -> None:
        try:
            if sample is not None:
                self.show(sample)
        finally:
            self._live.stop()


def _style(lines: list[Line]) -> Any:
    from rich.text import Text

    parts = [(line.text + "\n", _STYLES[line.kind]) for line in lines]
    text = Text.assemble(*parts, no_wrap=True, overflow="crop", end="")
    text.right_crop(1)  # the last new line
    return text


class _CellDisplay:
    """Draws the table anew below a cell, by the notebook's own means; rich needs ipywidgets."""

    def __init__(self):
        from IPython.display import display  # type: ignore[import-not-found]

        self._update: Callable[..., Any]
        handle = display({"text/plain": ""}, raw=True, display_id=True)
        assert handle is not None
        self._update = handle.update

    def show(self, sample: ProgressSample) -> None:
        self._update({"text/plain": table_text(sample)}, raw=True)

    def close(self, sample: ProgressSample | None) -> None:
        if sample is not None:
            self.show(sample)


class _LineDisplay:
    """Prints a line now and then: at first, after each `LINE_S`, and in the end."""

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
        print(f"tpudist: {describe_sample(sample)}", file=self._file, flush=True)


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: IPython was imported then, and its shell has a kernel."""
    ipython = sys.modules.get("IPython")
    with contextlib.suppress(AttributeError):
        return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None
    return False
