"""Which Python numbers among the arguments are fed, and which a function needs as they are.

As in `jax.jit`, a number is an array of a weak type to the function, so that another learning rate
is the same program. A boolean stays what it is, as in TensorFlow: two programs at most, and
`training is True` holds. Some functions need the number itself: as a shape, in `range` or `if`. No
list of such uses is complete, so a trace that fails is made again with the numbers as they are.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

import jax

from tpudist.run.arguments import call_arguments

_log = logging.getLogger("tpudist.compile")
# How JAX's errors name the inputs that a value depends on: "the argument local[3]".
_INPUT = re.compile(r"\w+\[(\d+)\]")
_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class TraceFailed(Exception):
    """A trace failed, in which numbers were fed.

    Attributes:
        wanted: Of which flat arguments the function seems to need the value.
    """

    def __init__(self, wanted: frozenset[int]):
        """See the class."""
        super().__init__()
        self.wanted = wanted

    @classmethod
    def of(
        cls, error: Exception, leaves: Sequence[Any], numbers: Sequence[int], inputs: Sequence[Any]
    ) -> "TraceFailed":
        """What is to be tried after `error`.

        The numbers that JAX names; else those that may be a shape or a condition; else all.

        Args:
            error: Of the trace.
            leaves: The flat arguments.
            numbers: Those that are fed numbers.
            inputs: For each input of the trace, of which flat argument it is.
        """
        named: set[int] = set()
        if isinstance(error, _NEEDS_VALUE):
            _, _, origin = str(error).partition("depends on the value")
            places = map(int, _INPUT.findall(origin.partition("\n")[0]))
            named = {inputs[i] for i in places if i < len(inputs)} & set(numbers)
        whole = {i for i in numbers if type(leaves[i]) is int}
        return cls(frozenset(named or whole or numbers))


def log_static(function: str, names: Sequence[str]) -> None:
    """Tells the logger `tpudist.compile` which arguments a function turned out to need."""
    _log.info(
        "%s needs %s as a Python number (for a shape, a condition or the like), so it is compiled "
        "for each value. RunOptions(static_argnums=) declares this in advance, and saves a trace.",
        function,
        " and ".join(names),
    )


def find_fed(
    leaves: Sequence[Any], names: Sequence[str], static: set[str], static_leaves: frozenset[int]
) -> frozenset[int]:
    """Which flat arguments are numbers that are fed.

    Args:
        leaves: The flat arguments.
        names: What they are called.
        static: The names of those that the function needs as they are.
        static_leaves: Those that the caller wants to be left as they are.
    """
    return frozenset(
        i
        for i, x in enumerate(leaves)
        if call_arguments.is_number(x) and i not in static_leaves and names[i] not in static
    )
