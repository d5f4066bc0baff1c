"""`tpudist run`: a program as one process, as `python` runs it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NoReturn

import tyro

from tpudist.cli.errors import WrongUse
from tpudist.cli.launch_command import find_program
from tpudist.goodput import goodput
from tpudist.verification import first_verification
from tpudist.xla import emulation


@dataclass(frozen=True)
class Options:
    """Runs a program as one process: tpudist run --emulate 8 train.py --steps 10."""

    script: tyro.conf.Positional[str]
    """A Python file, or another program; what follows are its arguments."""
    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """Of the program."""
    emulate: int | None = None
    """So many emulated CPU devices, also if the program does not ask for them; without it, the
    devices of this host."""
    verify: bool = False
    """Compare each step with one device at its first call, and stop if it differs."""
    goodput: str | None = None
    """A folder for notes of what the time goes to, which tpudist doctor reads."""


def run(options: Options) -> NoReturn:
    """Becomes the program, which has this terminal, gets its signals, and gives its exit code.

    Raises:
        WrongUse: There is no such program, or not as many devices.
    """
    if options.emulate is not None and options.emulate < 1:
        raise WrongUse(
            f"--emulate {options.emulate}: there must be one device at least. Leave it out for the "
            f"devices of this host."
        )
    command = [*find_program(options.script), *options.arguments]
    if options.emulate is not None:
        os.environ.update(emulation.environment_of(options.emulate))
    if options.goodput is not None:
        os.environ[goodput.VARIABLE] = options.goodput
    if options.verify:
        os.environ[first_verification.VARIABLE] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command[0], command)
