"""Ends a program of this folder with an exit code, and prints errors without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tpudist.training import interrupt
from tpudist.training.display import Display


def run_to_end(
    program: str, display: Display, run: Callable[[], int], refusals: tuple[type[Exception], ...]
) -> int:
    """Calls `run`, and returns its exit code.

    Args:
        program: Name of the program; an error line begins with it.
        display: Display of the run; it is closed.
        run: Called without arguments; returns an exit code.
        refusals: Errors that are printed without a traceback; the exit code is then 2.
    """
    try:
        return run()
    except refusals as refused:
        display.close()
        print(f"{program}: {refused}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # pressed twice, or before there was a step to finish
        display.close()
        display.print("Interrupted. The next run continues from the last checkpoint.")
        return interrupt.EXIT_CODE
    finally:
        display.close()
