"""Runs a program with the faults of its process; a `Pod` starts it.

`python -m tpudist.pytest_plugin.faulty_program FAULTS program.py ...`
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tpudist
from tpudist.pytest_plugin.fault import Fault


def main(words: Sequence[str]) -> None:
    """Runs a program with faults.

    Args:
        words: The faults as JSON, the program and its arguments.
    """
    faults = [Fault(**x) for x in json.loads(words[0])]
    process = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    own_faults = [fault for fault in faults if fault.process == process]
    run: Callable[..., Any] = tpudist.Strategy.run
    num_calls = 0

    def run_with_faults(self: tpudist.Strategy, *args: object, **kwargs: object) -> Any:
        nonlocal num_calls
        call, num_calls = num_calls, num_calls + 1
        for fault in own_faults:
            fault.strike(call)
        return run(self, *args, **kwargs)

    # The method of the class, so that calls of all strategies count together. Without faults, the
    # program runs unchanged.
    if own_faults:
        tpudist.Strategy.run = run_with_faults
    sys.argv = list(words[1:])
    sys.path[0] = os.path.dirname(os.path.abspath(words[1]))  # like `python program.py`
    runpy.run_path(words[1], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
