"""Operations that treat each element, or each row, by itself: padding stays where it is."""

from collections.abc import Sequence
from typing import Any

from tpudist.programs import elementwise
from tpudist.programs.rows.evaluator import Operation, Rule

# They move whole rows, or join arrays of the same rows.
_OF_ROWS = ("squeeze", "stack", "transpose", "unstack")
# They write a size into their result, and the padded one does. Random bits of more rows begin with
# those of fewer ones, if rows are their first dim; else they are other draws of the same kind.
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
    operation.check_params(but=("shape",))
    return operation.bind()


def _of_sizes(operation: Operation) -> Sequence[Any]:
    operation.check_params(but=_OF_SIZES[operation.name])
    return operation.bind()


RULES: dict[str, Rule] = {
    **dict.fromkeys((*elementwise.ALL, *_OF_ROWS), _each_element),
    **dict.fromkeys(_OF_SIZES, _of_sizes),
}
