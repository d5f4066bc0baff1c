"""Decides which Python numbers among the arguments are fed, and which a function needs by value.

As in `jax.jit`, a number is an array of a weak type in the function, so another learning rate runs
the same program. A boolean stays a boolean, as in TensorFlow: that makes at most two programs, and
`training is True` holds. Some functions need the number itself: as a shape, in `range` or `if`. No
list of such uses is complete, so if a trace fails, it is repeated with the numbers themselves.
"""

import logging
import re
from collections.abc import Collection, Sequence
from typing import Any

import jax

from tpudist.run.arguments import call_arguments

_log = logging.getLogger("tpudist.compile")
# JAX's errors name the inputs that a value depends on: "the argument local[3]".
_INPUT = re.compile(r"\w+\[(\d+)\]")
_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class TraceFailed(Exception):
    """A trace in which numbers were fed has failed.

    Attributes:
        leaves: The flat arguments whose value the function seems to need.
    """

    def __init__(self, leaves: frozenset[int]):
        super().__init__()
        self.leaves = leaves

    @classmethod
    def of(
        cls,
        error: Exception,
        leaves: Sequence[Any],
        numbers: Sequence[int],
        inputs: Sequence[int],
    ) -> "TraceFailed":
        """Returns the exception with the numbers that should be passed by value after `error`.

        These are the numbers that JAX names; or else integers, which may be a shape or a condition;
        or else all numbers.

        Args:
            numbers: Positions of the fed numbers among `leaves`.
            inputs: For each input of the trace, the flat argument that it belongs to.
        """
        named: set[int] = set()
        if isinstance(error, _NEEDS_VALUE):
            # JAX names the inputs in the same line.
            _, _, origin = str(error).partition("depends on the value")
            places = map(int, _INPUT.findall(origin.partition("\n")[0]))
            named = {inputs[i] for i in places if i < len(inputs)} & set(numbers)
        whole = {i for i in numbers if type(leaves[i]) is int}
        return cls(frozenset(named or whole or numbers))


def log_static(function: str, names: Sequence[str]) -> None:
    """Logs to `tpudist.compile` the arguments whose value a function turned out to need."""
    _log.info(
        "%s needs %s as a Python number (for a shape, a condition or the like), so it is compiled "
        "for each value. RunOptions(static_argnums=) declares this in advance, and saves a trace.",
        function,
        " and ".join(names),
    )


def find_fed(
    leaves: Sequence[Any],
    names: Sequence[str],
    static_names: Collection[str],
    static_leaves: Collection[int],
) -> frozenset[int]:
    """Returns the positions of the flat arguments that are fed numbers.

    Args:
        static_names: Names of the arguments whose value the function needs.
        static_leaves: Positions that the caller wants to pass by value.
    """
    return frozenset(
        i
        for i, x in enumerate(leaves)
        if call_arguments.is_number(x) and i not in static_leaves and names[i] not in static_names
    )
