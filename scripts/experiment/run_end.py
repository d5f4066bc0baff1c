"""How a program of this folder ends: with what its run came to, or with what refused it, told."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tpudist.training import interrupt
from tpudist.training.display import Display


def run_to_end(
    program: str, display: Display, run: Callable[[], int], refusals: tuple[type[Exception], ...]
) -> int:
    """Runs, and gives the exit code.

    Args:
        program: Its name, which begins the line that tells a refusal.
        display: What shows the run; it is closed.
        run: The run, which gives an exit code.
        refusals: Errors whose message says all that a user needs: it is told, and the code is 2.
    """
    try:
        return run()
    except refusals as refused:
        display.close()
        print(f"{program}: {refused}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # pressed twice, or before there was a step to finish
        display.close()
        display.say("Interrupted; the last checkpoint is what a next run goes on from.")
        return interrupt.EXIT_CODE
    finally:
        display.close()
