"""What people see of a run: a progress bar on a terminal, plain lines in a pipe or a file."""

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
    """Shows the progress of a run of `num_steps` steps, and what is worth a line."""

    def say(self, line: str) -> None:
        """Shows a line that stays."""
        ...

    def phase(self, name: str) -> None:
        """Says what takes time now, as "compiling"."""
        ...

    def step(self, step: int, metrics: str, speed: str, left_s: float | None) -> None:
        """Shows that `step` steps are done, with what is left in seconds, if it is known."""
        ...

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Shows the `rows` of a table, (name, value)."""
        ...

    def text(self, title: str, prompt: str, text: str) -> None:
        """Shows a piece of text that the model wrote, after its prompt."""
        ...

    def close(self) -> None:
        """Ends the progress; lines and tables can still be shown."""
        ...


def make_display(num_steps: int, *, quiet: bool = False, file: IO[str] | None = None) -> Display:
    """The display for `file` (standard output): silent if `quiet`, a bar on a terminal."""
    if quiet:
        return _Silent()
    out = sys.stdout if file is None else file
    console = Console(file=out, highlight=False)
    return _Bar(console, num_steps) if console.is_terminal else _Lines(out, num_steps)


def _table(title: str, rows: list[tuple[str, str]]) -> TextTable:
    return TextTable((Column(is_short=True, style="cyan"), ""), rows, title, has_header=False)


def clock(seconds: float) -> str:
    """`83` as `1:23`, `3700` as `1:01:40`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class _Bar:
    def __init__(self, console: Console, num_steps: int):
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.fields[metrics]}"),
            TextColumn("[green]{task.fields[speed]}"),
            TextColumn("[yellow]{task.fields[left]}"),
            console=console,
            expand=True,
            transient=True,
        )
        self._task = self._progress.add_task(
            "starting", total=num_steps, metrics="", speed="", left=""
        )
        self._progress.start()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def phase(self, name: str) -> None:
        self._progress.update(self._task, description=name)

    def step(self, step: int, metrics: str, speed: str, left_s: float | None) -> None:
        left = "" if left_s is None else f"{clock(left_s)} left"
        self._progress.update(self._task, completed=step, metrics=metrics, speed=speed, left=left)

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        self._console.print(_table(title, rows))

    def text(self, title: str, prompt: str, text: str) -> None:
        self._console.rule(title, align="left")
        self._console.print(prompt, style="bold", end="", markup=False)
        self._console.print(text, markup=False)
        self._console.rule()

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    """A line about every 20th of the run, but none within `QUIET_S` of the last."""

    QUIET_S = 5.0

    def __init__(self, file: IO[str], num_steps: int):
        self._file = file
        self._num_steps = num_steps
        self._every = max(1, num_steps // 20)
        self._last_step, self._last_time = 0, 0.0

    def say(self, line: str) -> None:
        print(line, file=self._file, flush=True)

    def phase(self, name: str) -> None:
        pass

    def step(self, step: int, metrics: str, speed: str, left_s: float | None) -> None:
        due = step - self._last_step >= self._every
        rested = time.monotonic() - self._last_time >= self.QUIET_S
        first = self._last_step == 0  # also of a run that goes on
        if not (due and rested) and not first and step != self._num_steps:
            return
        self._last_step, self._last_time = step, time.monotonic()
        parts = [f"step {step}/{self._num_steps}", metrics, speed]
        if left_s is not None:
            parts.append(f"{clock(left_s)} left")
        self.say("  ".join(part for part in parts if part))

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        self.say(f"{title}\n{textwrap.indent(str(_table('', rows)), '  ')}")

    def text(self, title: str, prompt: str, text: str) -> None:
        self.say(f"--- {title} ---\n{prompt}{text}\n---")

    def close(self) -> None:
        pass


class _Silent:
    def say(self, line: str) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def step(self, step: int, metrics: str, speed: str, left_s: float | None) -> None:
        pass

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        pass

    def text(self, title: str, prompt: str, text: str) -> None:
        pass

    def close(self) -> None:
        pass
