"""Output of the commands.

A reader may close a pipe early, as in `tpudist plan ... | head`. Then the rest of the output is
discarded, and the command continues: it still writes its files and returns its exit code.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType


def print_parts(*parts: RenderableType) -> None:
    """Prints texts, tables and other parts of a report to standard output."""
    with _ignore_broken_pipe(sys.stdout):
        page = _Console(highlight=False, markup=False, emoji=False)
        for part in parts:
            page.print(part)


def print_text(text: str) -> None:
    """Prints a text to standard output, without line breaks of its own."""
    _print(text, sys.stdout)


def print_message(message: str) -> None:
    """Prints a message to standard error."""
    _print(message, sys.stderr)


def hide_home(text: str) -> str:
    """Returns a text for a public issue: with "~" for the home directory, which names the user."""
    home = Path.home()
    # In some containers it is "/", with which all paths begin.
    return text if home == home.parent else text.replace(str(home), "~")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError, where rich would end the process with exit code 1."""
        raise BrokenPipeError


def _print(text: str, file: TextIO) -> None:
    with _ignore_broken_pipe(file):
        print(text, file=file, flush=True)


@contextlib.contextmanager
def _ignore_broken_pipe(file: TextIO) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # Python flushes its buffer at the end of the process, which would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # The descriptor is replaced, not `sys.stdout`: the buffer belongs to the file object.
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)
