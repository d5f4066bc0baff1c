"""Progress of a run: a bar on a terminal, plain lines in a pipe or a file."""

from __future__ import annotations

import sys
import textwrap
import time
from typing import IO, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from tpudist.display.text_tables import Column, TextTable


@runtime_checkable
class Display(Protocol):
    """Progress display of a run."""

    def print(self, line: str) -> None:
        """Prints a line that stays."""
        ...

    def set_phase(self, name: str) -> None:
        """Shows the current phase of the run, such as "compiling"."""
        ...

    def update(self, step: int, metrics: str, speed: str, left_s: float | None) -> None:
        """Shows the number of finished steps, and the remaining seconds if they are known."""
        ...

    def print_table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Prints rows (name, value)."""
        ...

    def print_text(self, title: str, prompt: str, text: str) -> None:
        """Prints text that the model has written, after its prompt."""
        ...

    def close(self) -> None:
        """Removes the progress; lines and tables can still be printed."""
        ...


def make_display(num_steps: int, *, quiet: bool = False, file: IO[str] | None = None) -> Display:
    """Returns the display for `file` (default: standard output): a bar on a terminal, or lines."""
    if quiet:
        return _NoDisplay()
    out = sys.stdout if file is None else file
    console = Console(file=out, highlight=False)
    return _BarDisplay(console, num_steps) if console.is_terminal else _LineDisplay(out, num_steps)


def _table(title: str, rows: list[tuple[str, str]]) -> TextTable:
    return TextTable((Column(is_short=True, style="cyan"), ""), rows, title, has_header=False)


def format_clock(seconds: float) -> str:
    """Returns `1:23` for 83 seconds, `1:01:40` for 3700."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class _BarDisplay:
    def __init__(self, console: Console, num_steps: int):
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            # Metrics and speed are fields of the task, because rich redraws the columns from the
            # task alone.
            TextColumn("[cyan]{task.fields[metrics]}"),
            TextColumn("[green]{task.fields[speed]}"),
            TextColumn("[yellow]{task.fields[left]}"),
            console=console,
            expand=True,
            # Removed at the end: only lines and tables stay in the terminal.
            transient=True,
        )
        self._task = self._progress.add_task(
            "starting", total=num_steps, metrics="", speed="", left=""
        )
        self._progress.start()

    def print(self, line: str) -> None:
        self._console.print(line, markup=False)

    def set_phase(self, name: str) -> None:
        self._progress.update(self._task, description=name)

    def update(self, step: int, metrics: str, speed: str, left_s: float | None) -> None:
        left = "" if left_s is None else f"{format_clock(left_s)} left"
        self._progress.update(self._task, completed=step, metrics=metrics, speed=speed, left=left)

    def print_table(self, title: str, rows: list[tuple[str, str]]) -> None:
        self._console.print(_table(title, rows))

    def print_text(self, title: str, prompt: str, text: str) -> None:
        self._console.rule(title, align="left")
        self._console.print(prompt, style="bold", end="", markup=False)
        self._console.print(text, markup=False)
        self._console.rule()

    def close(self) -> None:
        self._progress.stop()


class _LineDisplay:
    """Prints a line after each twentieth of the run, but at most one every `QUIET_S` seconds.

    The first and the last step always have a line.
    """

    QUIET_S = 5.0

    def __init__(self, file: IO[str], num_steps: int):
        self._file = file
        self._num_steps = num_steps
        self._every = max(1, num_steps // 20)
        self._last_step, self._last_time = 0, 0.0

    def print(self, line: str) -> None:
        print(line, file=self._file, flush=True)

    def set_phase(self, name: str) -> None:
        pass

    def update(self, step: int, metrics: str, speed: str, left_s: float | None) -> None:
        due = step - self._last_step >= self._every
        rested = time.monotonic() - self._last_time >= self.QUIET_S
        is_first = self._last_step == 0  # the first call, whatever its step: a run may resume
        # Both bounds: fast steps would fill a log every second, slow ones would print a line for
        # each step. The last step always prints, so that the log ends with the final metrics.
        if not (due and rested) and not is_first and step != self._num_steps:
            return
        self._last_step, self._last_time = step, time.monotonic()
        parts = [f"step {step}/{self._num_steps}", metrics, speed]
        if left_s is not None:
            parts.append(f"{format_clock(left_s)} left")
        self.print("  ".join(part for part in parts if part))

    def print_table(self, title: str, rows: list[tuple[str, str]]) -> None:
        self.print(f"{title}\n{textwrap.indent(str(_table('', rows)), '  ')}")

    def print_text(self, title: str, prompt: str, text: str) -> None:
        self.print(f"--- {title} ---\n{prompt}{text}\n---")

    def close(self) -> None:
        pass


class _NoDisplay:
    def print(self, line: str) -> None:
        pass

    def set_phase(self, name: str) -> None:
        pass

    def update(self, step: int, metrics: str, speed: str, left_s: float | None) -> None:
        pass

    def print_table(self, title: str, rows: list[tuple[str, str]]) -> None:
        pass

    def print_text(self, title: str, prompt: str, text: str) -> None:
        pass

    def close(self) -> None:
        pass
