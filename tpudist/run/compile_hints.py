"""Suggests, once per function, how to make a slow compile faster."""

import logging

from tpudist.lowering import alike_layers
from tpudist.programs.jaxprs import Program

_log = logging.getLogger("tpudist.compile")
SLOW_S = 10.0  # a faster compile is not worth a change of the model
_hinted: set[str] = set()


def suggest_loop(name: str, seconds: float, program: Program) -> None:
    """Logs that a function has alike layers, if its compile was slow: a loop compiles them as one.

    Args:
        name: Name of the function.
        seconds: Seconds of the call that compiled.
        program: Program of one replica.
    """
    if seconds < SLOW_S or name in _hinted:
        return
    layers = alike_layers.find(program)
    if layers is not None:
        _hinted.add(name)
        _log.warning(
            "%s has %d alike layers of %d operations, and compiles each of them. nnx.scan (Flax "
            "NNX), nn.scan (Linen) or jax.lax.scan compiles them as one: see "
            '"Compile alike layers as one" in docs/debugging.md.',
            *(name, layers.count, layers.num_operations),
        )
