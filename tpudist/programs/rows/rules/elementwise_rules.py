"""Rules of operations on each element or each row: padding keeps its place."""

from collections.abc import Sequence
from typing import Any

from tpudist.programs import elementwise
from tpudist.programs.rows.evaluator import Operation, Rule

# These move whole rows, or join arrays of the same rows.
_OF_ROWS = ("squeeze", "stack", "transpose", "unstack")
# The result has the padded size. Random bits for more rows begin with the bits for fewer rows if
# rows are the first dim (threefry is partitionable). Otherwise they are different draws from the
# same distribution.
_OF_SIZES = {
    "broadcast_in_dim": ("shape",),
    "broadcast_to": ("shape",),
    "empty": ("shape",),
    "empty2": ("shape",),
    "iota": ("shape",),
    "random_bits": ("shape",),
    "random_split": ("shape",),
    "iota_2x32_shape": ("shape",),
    "rng_bit_generator": ("shape",),
}


def _each_element(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("shape",))
    return operation.bind()


def _of_sizes(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=_OF_SIZES[operation.name])
    return operation.bind()


RULES: dict[str, Rule] = {
    **dict.fromkeys((*elementwise.ALL, *_OF_ROWS), _each_element),
    **dict.fromkeys(_OF_SIZES, _of_sizes),
}
