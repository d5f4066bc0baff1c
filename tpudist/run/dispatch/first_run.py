"""Agreement of the processes on a step's program, before it runs for the first time.

If the environment variable `TPUDIST_CHECK_VALUES` is 1, they agree before each call, too. Processes
that run different programs would wait for each other forever in a collective.
"""

import os
from collections.abc import Callable

import jax
import numpy as np

from tpudist.processes import process_agreement
from tpudist.programs import program_digest
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.run.arguments import call_description
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.values.per_replica import PerReplica
from tpudist.xla import descriptions, user_code
from tpudist.xla.mesh import ReplicaMesh

CHECK_VALUES = "TPUDIST_CHECK_VALUES"
"""Environment variable: 1 makes processes compare the values of each call, not only the first."""


def agree_on_program(
    mesh: ReplicaMesh, name: str, call: RunCall, closed: ClosedJaxpr
) -> Callable[[], None] | None:
    """Returns when all processes are about to run this program; see `process_agreement`.

    Arguments of the call that all replicas share are compared by value.

    Returns:
        A function to call at each run; None in one process.

    Raises:
        ProcessesDifferError: If another process runs another program or has other values.
    """
    if not process_agreement.is_needed(mesh):
        return None
    return process_agreement.agree(
        mesh,
        process_agreement.Intention(
            describe_run(name, call.fn),
            _describe_arguments(call),
            program_digest.write_program(closed),
        ),
    )


def checks_each_call(mesh: ReplicaMesh) -> bool:
    """Whether processes compare the values that all replicas share at each call."""
    return process_agreement.is_needed(mesh) and os.environ.get(CHECK_VALUES, "0") not in ("", "0")


def agree_on_values(mesh: ReplicaMesh, name: str, call: RunCall) -> None:
    """Returns when all processes are about to make this call, with the same values.

    Raises:
        ProcessesDifferError: If another process makes another call or has other values.
    """
    process_agreement.agree(
        mesh,
        process_agreement.Intention(
            f"a call of {describe_run(name, call.fn)}", _describe_arguments(call)
        ),
    )


def describe_run(name: str, fn: Callable[..., object]) -> str:
    """Returns a description of a call of the function `name`, with the line of its definition."""
    line = user_code.line_of_definition(fn)
    place = f" ({line})" if line else ""
    return f"Strategy.run of '{name}'{place}"


def _describe_arguments(call: RunCall) -> dict[str, str]:
    names = call_description.names_of_leaves(call.fn, call.args, call.kwargs)
    return {
        f"argument '{name}'": _describe(leaf)
        for name, leaf in zip(names, call.leaves(), strict=True)
    }


def _describe(leaf: object) -> str:
    if isinstance(leaf, PerReplica):  # parts and real rows may differ between processes
        return f"{descriptions.describe_array(leaf)} per replica"
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex | str):
        return program_digest.write_value(leaf)
    return f"a {type(leaf).__name__}"
