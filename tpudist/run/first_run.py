"""What the processes of a run agree on before a step's program runs for the first time.

And before each call, where the variable `TPUDIST_CHECK_VALUES` asks for it.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tpudist.processes import process_agreement
from tpudist.programs import program_digest
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.run.arguments import call_arguments, call_description
from tpudist.values.per_replica import PerReplica
from tpudist.xla import compile_log
from tpudist.xla.mesh import ReplicaMesh

CHECK_VALUES = "TPUDIST_CHECK_VALUES"
"""A variable: 1 has processes compare the values of each call, rather than of the first."""


def agree_on_program(
    mesh: ReplicaMesh, name: str, now: call_arguments.Call, closed: ClosedJaxpr
) -> Callable[[], None] | None:
    """Returns when all processes are about to run this program; see `process_agreement`.

    Args:
        mesh: On which it runs.
        name: Of the function.
        now: The first call. What it was given for all replicas is compared by value.
        closed: What each replica computes.

    Returns:
        To be called at each run; None in one process.

    Raises:
        ProcessesDifferError: Others run another program, or were given other values.
    """
    if not process_agreement.is_needed(mesh):
        return None
    return process_agreement.agree(
        mesh,
        process_agreement.Intention(
            f"Strategy.run of '{name}'{_place_of(now.fn)}",
            _describe_arguments(now),
            program_digest.write_program(closed),
        ),
    )


def checks_each_call(mesh: ReplicaMesh) -> bool:
    """Whether the values that are the same for all replicas are compared at each call."""
    return process_agreement.is_needed(mesh) and os.environ.get(CHECK_VALUES, "0") not in ("", "0")


def agree_on_values(mesh: ReplicaMesh, name: str, now: call_arguments.Call) -> None:
    """Returns when all processes are about to make this call, with the same values.

    Raises:
        ProcessesDifferError: Others make another call, or were given other values.
    """
    process_agreement.agree(
        mesh,
        process_agreement.Intention(
            f"a call of Strategy.run of '{name}'{_place_of(now.fn)}", _describe_arguments(now)
        ),
    )


def _place_of(fn: Callable[..., Any]) -> str:
    code = getattr(fn, "__code__", None)
    if code is None:
        return ""
    return f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def _describe_arguments(now: call_arguments.Call) -> dict[str, str]:
    names = call_description.names_of_leaves(now.fn, now.args, now.kwargs)
    return {
        f"argument '{name}'": _describe(leaf)
        for name, leaf in zip(names, now.leaves(), strict=True)
    }


def _describe(leaf: Any) -> str:
    if isinstance(leaf, PerReplica):  # whose parts, and numbers of real rows, are each one's own
        return f"{compile_log.describe(leaf)} per replica"
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex | str):
        return program_digest.write_value(leaf)
    return f"a {type(leaf).__name__}"
