"""`tpudist port`: ports a program from tf.distribute, and lists what to port manually."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from tpudist.cli import option_types
from tpudist.cli.console import print_message, print_text
from tpudist.cli.errors import WrongUse, explain_write_errors

if TYPE_CHECKING:
    # Importing `port` needs LibCST, which may be missing.
    from tpudist.port.leftovers import Leftover

EPILOG = """
examples:
  tpudist port train.py
  tpudist port train.py --output train_jax.py

exit codes: 0 nothing is left to port manually, 1 something is left, 2 wrong use or unreadable file
"""
SECONDS_WITHOUT_PROGRESS = 1.0
COMPLETE, INCOMPLETE = 0, 1
"""Exit codes: whether the port is complete, or parts are left to port manually."""


@dataclass(frozen=True)
class Options:
    """Port a program from tf.distribute to tpudist.

    Prints the changes as a diff, and on standard error a list of what to port manually.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """Python program, or a notebook (.ipynb)."""
    write: tyro.conf.FlagCreatePairsOff[bool] = False
    """Overwrite the file with the ported program."""
    output: option_types.File = None
    """File for the ported program (default: print a diff)."""
    diff: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the diff in addition to writing a file."""
    module: tyro.conf.FlagCreatePairsOff[bool] = False
    """Treat the file as a module of a program, which creates no strategy."""


def run(options: Options) -> int:
    """Ports the file, prints or writes the result, and returns the exit code.

    Raises:
        WrongUse: If the file does not exist, cannot be ported or cannot be written.
    """
    if options.write and options.output is not None:
        raise WrongUse(
            "--write overwrites the file, and --output writes another one. Omit one of them."
        )
    source = _read(options.file)
    print_message(f"Porting {options.file}.")
    try:
        from tpudist import port
    except ModuleNotFoundError as error:
        # Another missing module is our mistake or a broken installation, and deserves its
        # traceback.
        if error.name != "libcst":
            raise
        raise WrongUse(
            "tpudist port needs LibCST. Install it in the clone: pip install -e '.[port]'."
        ) from error
    is_notebook = options.file.suffix == ".ipynb"
    port_file = port.port_notebook if is_notebook else port.port_program
    try:
        progress = _Progress(options.file)
        # The file is written only after the whole program is ported, so an error leaves it
        # unchanged.
        ported = port_file(source, creates_strategy=not options.module, on_pass=progress.update)
    except port.CannotPort as error:
        raise WrongUse(f"{options.file} cannot be ported. {error}") from error
    target = options.file if options.write else options.output
    if target is None or options.diff:
        before, after = source, ported.source
        if is_notebook:
            before, after = port.show_code(before), port.show_code(after)
        print_text(_diff(str(options.file), before, after))
    if target is not None:
        with explain_write_errors():
            # The text has the line ends of the source, "\r\n" included.
            target.write_text(ported.source, encoding="utf-8", newline="")
    # On standard error, so that `tpudist port train.py > changes.diff` writes only the diff. Each
    # line begins with "file:line:", which editors and CI services turn into links.
    for line in _format_leftovers(target or options.file, ported.leftovers, ported.stays):
        print_message(line)
    return INCOMPLETE if ported.leftovers else COMPLETE


class _Progress:
    """Prints the progress at most once per second, so short ports print nothing."""

    def __init__(self, file: Path):
        self._file = file
        self._printed_s = time.monotonic()

    def update(self, number: int, total: int) -> None:
        """Reports that `number` of `total` passes are finished."""
        if number < total and time.monotonic() - self._printed_s > SECONDS_WITHOUT_PROGRESS:
            self._printed_s = time.monotonic()
            print_message(f"{self._file}: {number} of {total} passes done.")


def _diff(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", lineterm=""
    )
    return "\n".join(lines)


def _format_leftovers(
    file: Path, leftovers: Sequence[Leftover], stays: tuple[str, ...]
) -> list[str]:
    """Returns a line per leftover, the packages that the program needs, and a summary."""
    lines = [
        f"{file}{f', cell {x.cell}' if x.cell else ''}:{x.line}: {x.name}: "
        f"{x.instruction} ({x.section})"
        for x in leftovers
    ]
    if stays:
        lines.append(f"{file}: {_name_packages(stays)}")
    num = len(leftovers)
    things = "thing is" if num == 1 else "things are"
    lines.append(
        f"{file}: {num} {things} left to port manually; the line numbers are those after the port."
        if num
        else f"{file}: nothing is left to port manually."
    )
    return lines


def _name_packages(stays: tuple[str, ...]) -> str:
    need = "it needs" if len(stays) == 1 else "they need"
    packages, install = "TensorFlow", "tensorflow-cpu"
    if {"tf.summary", "keras.callbacks.TensorBoard"} & set(stays):
        packages, install = f"{packages} and tensorboard", f"{install} tensorboard"
    return f"{', '.join(stays)} may stay; {need} {packages}: pip install {install}"


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", newline="") as opened:  # keeps "\r\n"
            return opened.read()
    except OSError as error:
        reason = error.strerror or error
        raise WrongUse(f"{file} cannot be read: {reason}. Pass a Python program.") from error
    except UnicodeDecodeError as error:
        raise WrongUse(f"{file} is not UTF-8 text. Pass a Python program.") from error
