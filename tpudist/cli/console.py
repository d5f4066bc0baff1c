"""Prints what a command found, and lets whoever reads it stop, as in `tpudist plan ... | head`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich import console


def show(*found: Any) -> None:
    """Prints what `rich` can show to standard output, for as long as somebody reads it."""
    with _ignore_broken_pipe(sys.stdout):
        page = _Console(highlight=False, markup=False, emoji=False)
        for one in found:
            page.print(one)


def write(text: str) -> None:
    """Prints a text to standard output as it is, for as long as somebody reads it."""
    _print(text, sys.stdout)


def say(message: str) -> None:
    """Prints a message to standard error, for as long as somebody reads it."""
    _print(message, sys.stderr)


class _Console(console.Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to `_ignore_broken_pipe`: rich would end the process, with exit code 1."""
        raise BrokenPipeError


def _print(text: str, file: TextIO) -> None:
    with _ignore_broken_pipe(file):
        print(text, file=file, flush=True)


@contextlib.contextmanager
def _ignore_broken_pipe(file: TextIO) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # What is still in the buffer goes nowhere when the process ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)
