"""Prints where the program of this process is, and ends the process without Python's shutdown."""

import sys
import traceback
from typing import NoReturn

from tpudist.goodput import goodput
from tpudist.processes import generations
from tpudist.processes.host import this_host

_NUM_FRAMES = 12  # enough to pass the frames of tpudist and JAX, and to reach the program


def raise_in_program(error: type[RuntimeError], message: str) -> None:
    """Raises in the thread of the program, at its next line of Python."""

    # CPython raises a class in another thread, without arguments, so the message is in the class.
    def __str__(self: RuntimeError) -> str:
        return message

    members = {"__str__": __str__, "__module__": error.__module__}
    generations.raise_in(generations.program_thread(), type(error.__name__, (error,), members))


def stack_of_program() -> str:
    """Returns the innermost Python frames of the program, also if it waits in C++."""
    frame = this_host().stack_of(generations.program_thread())
    return (
        "".join(traceback.format_stack(frame)[-_NUM_FRAMES:]) if frame else "  (an unknown place)\n"
    )


def print_all_threads() -> None:
    """Prints the stacks of all threads to the process's error output."""
    try:
        this_host().print_all_stacks()
    except Exception:  # the descriptor is closed, so nobody can read a message
        pass


def print_error(text: str) -> None:
    """Prints a line to the error output, if there is one."""
    try:
        this_host().print_error(text.rstrip() + "\n")
    except Exception:  # closed, as by a notebook, so nobody can read a message
        pass


def exit_now(code: int) -> NoReturn:
    """Ends the process without Python's shutdown.

    JAX's own exit handler would wait in a barrier for processes that are dead, and then abort.
    """
    goodput.flush()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, so nobody can read the rest
            pass
    this_host().exit(code)
