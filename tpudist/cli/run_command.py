"""`tpudist run`: runs a program as one process, as `python` does."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated, NoReturn

import tyro

from tpudist.cli import option_types
from tpudist.cli.errors import WrongUse
from tpudist.cli.launch_command import find_program

EPILOG = """
examples:
  tpudist run --emulate 8 train.py --steps 10
  tpudist run --verify train.py

exit codes: those of the program; 2 wrong use
"""


@dataclass(frozen=True)
class Options:
    """Run a program as one process."""

    script: option_types.Script
    """Python file, or another program."""
    arguments: option_types.Arguments = ()
    """Arguments passed to the program."""
    emulate: option_types.Count = None
    """Number of emulated CPU devices (default: use the devices of this host)."""
    verify: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compare each step with one device at its first call; stop if it differs."""
    goodput: Annotated[str | None, option_types.value_name(metavar="FOLDER")] = None
    """Folder for records of the time, for tpudist doctor (default: no records)."""


def run(options: Options) -> NoReturn:
    """Replaces this process by the program, which keeps its terminal, signals and exit code.

    Raises:
        WrongUse: If there is no such program, or the number of devices is not positive.
    """
    from tpudist.goodput import goodput
    from tpudist.verification import first_verification
    from tpudist.xla import emulation

    if options.emulate is not None and options.emulate < 1:
        raise WrongUse(
            f"--emulate {options.emulate}: must be at least 1. Omit it to use the devices of this "
            f"host."
        )
    command = [*find_program(options.script), *options.arguments]
    if options.emulate is not None:
        # Through the environment, because JAX reads the number of CPU devices when it starts, and
        # because processes that the program starts need it as well.
        os.environ.update(emulation.environment_of(options.emulate))
    if options.goodput is not None:
        os.environ[goodput.FOLDER_VARIABLE] = options.goodput
    if options.verify:
        os.environ[first_verification.VARIABLE] = "1"
    # `execvp` discards Python's buffers. From here on this process is the program: no `finally` and
    # no exit handler of tpudist runs.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command[0], command)
