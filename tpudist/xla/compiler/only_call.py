"""Programs that only call a function of `jax.jit`.

Such a program is the trace of a method that calls the jitted function of its object, or of a
`functools.partial`.
"""

from typing import Any

import jax
from jax.extend import core
from jax.sharding import Sharding


def jit_only_call(traced: jax.stages.Traced) -> Any:
    """Returns the function that a program only calls, jitted; None if it does anything else.

    The result has the donation and the shardings of the called function, which JAX ignores if
    another jitted function calls it. Its arguments are the inputs of the program. It returns all
    results of the called function, including results that the caller keeps in an object.
    """
    closed = traced.jaxpr
    if len(closed.eqns) != 1 or "donated_invars" not in closed.eqns[0].params:
        return None
    call = closed.eqns[0]
    donated, shardings = [], []
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for number, x in enumerate(closed.jaxpr.invars):
        places = [i for i, operand in enumerate(call.invars) if operand is x]
        if any(call.params["donated_invars"][i] for i in places):
            donated.append(number)
        # JAX marks an unspecified sharding by an object of its own.
        specified = [call.params["in_shardings"][i] for i in places]
        shardings.append(next((s for s in specified if isinstance(s, Sharding)), None))

    def call_function(*arrays: jax.Array) -> list[jax.Array]:
        values = constants | dict(zip(closed.jaxpr.invars, arrays, strict=True))
        operands = [x.val if isinstance(x, core.Literal) else values[x] for x in call.invars]
        return core.jaxpr_as_fun(call.params["jaxpr"])(*operands)

    results = [s if isinstance(s, Sharding) else None for s in call.params["out_shardings"]]
    return jax.jit(
        call_function, donate_argnums=donated, in_shardings=tuple(shardings), out_shardings=results
    )
