"""Programs that only call a function of `jax.jit`.

Such a program is the trace of a method that calls the jitted function of its object, or of a
`functools.partial`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class OnlyCall:
    """The only call of a program.

    Attributes:
        program: The called program.
        numbers: For each of its inputs, the number of the input of the caller; None for a constant.
        donated: Whether its results may use the memory of each input.
        shardings: The sharding that each input must have; None if it keeps its own.
    """

    program: core.Jaxpr
    numbers: Sequence[int | None]
    donated: Sequence[bool]
    shardings: Sequence[Sharding | None]


def find_only_call(caller: core.Jaxpr) -> OnlyCall | None:
    """Returns the call of a program that only calls a function of `jax.jit`, or None."""
    if len(caller.eqns) != 1 or "donated_invars" not in caller.eqns[0].params:
        return None
    call = caller.eqns[0]
    places = {x: i for i, x in enumerate(caller.jaxpr.invars)}
    return OnlyCall(
        call.params["jaxpr"],
        [None if isinstance(x, core.Literal) else places.get(x) for x in call.invars],
        call.params["donated_invars"],
        _read_shardings(call.params["in_shardings"]),
    )


def jit_only_call(traced: jax.stages.Traced) -> Any:
    """Returns the function that a program only calls, jitted; None if it does anything else.

    The result has the donation and the shardings of the called function, which JAX ignores if
    another jitted function calls it. Its arguments are the inputs of the program. It returns all
    results of the called function, including results that the caller keeps in an object.
    """
    closed = traced.jaxpr
    found = find_only_call(closed)
    if found is None:
        return None
    call = closed.eqns[0]
    donated = set[int]()
    shardings: list[Sharding | None] = [None] * len(closed.jaxpr.invars)
    for i, number in enumerate(found.numbers):
        if number is not None:
            shardings[number] = shardings[number] or found.shardings[i]
            donated |= {number} if found.donated[i] else set()
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def call_function(*arrays: jax.Array) -> list[jax.Array]:
        values = constants | dict(zip(closed.jaxpr.invars, arrays, strict=True))
        operands = [x.val if isinstance(x, core.Literal) else values[x] for x in call.invars]
        return core.jaxpr_as_fun(found.program)(*operands)

    return jax.jit(
        call_function,
        donate_argnums=sorted(donated),
        in_shardings=tuple(shardings),
        out_shardings=_read_shardings(call.params["out_shardings"]),
    )


def _read_shardings(shardings: Sequence[object]) -> list[Sharding | None]:
    """Returns shardings; JAX marks an unspecified one by an object of its own."""
    return [x if isinstance(x, Sharding) else None for x in shardings]
