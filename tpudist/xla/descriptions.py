"""Describes functions, calls and arrays in messages, and the difference between two calls.

A signature has a description of each input of a call by name. Calls with different signatures need
different programs.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from tpudist.array_types import Shape
from tpudist.xla.array_attributes import is_weakly_typed

# Prefix of the names of captured values in signatures. The name of an argument has no space.
CAPTURED = "captured "
_MAX_CHANGES = 3  # in the text of a difference


def name_of(function: Callable[..., object]) -> str:
    """Returns the name of a function, or of the function that a `functools.partial` or wrapper has.

    An object with `__call__` has no `__name__`.
    """
    while isinstance(function, functools.partial):
        function = function.func
    wrapped = getattr(function, "__wrapped__", None)
    if not hasattr(function, "__name__") and wrapped is not None:
        return name_of(wrapped)
    return getattr(function, "__name__", type(function).__name__)


def describe_call(name: str, arguments: str, is_cross_replica: bool) -> str:
    """Returns the text of a call, for advice: `strategy.run(step, args=(batch,))`.

    Args:
        name: Name of the function.
        arguments: Text of the arguments, such as `model, ...`.
        is_cross_replica: Whether the function is a `tpudist.function`, which needs no `run`.
    """
    if is_cross_replica:
        return f"{name}({arguments})"
    return f"strategy.run({name}, args=({arguments}))"


class ShapedValue(Protocol):
    """An array, the shape of one, or a PerReplica of arrays."""

    @property
    def shape(self) -> Shape:
        """Sizes of the dims."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the elements."""
        ...


def describe_array(value: ShapedValue) -> str:
    """Returns an array's dtype and shape as JAX writes them, such as `float32[8,128]`."""
    shape = ",".join(map(str, value.shape))
    weak = "weak " if is_weakly_typed(value) else ""
    return f"{weak}{value.dtype}[{shape}]"


def nearest_signature(
    earlier: Sequence[Mapping[str, str]], new: Mapping[str, str]
) -> Mapping[str, str]:
    """Returns the signature that differs from `new` in the fewest inputs.

    If several do, prefers one in which only captured values differ, then the latest.

    Args:
        earlier: Signatures of the programs compiled before, oldest first; at least 1.
        new: Signature of the call that is compiled now.
    """

    # Reversed, because `min` returns the first of several equal candidates.
    def distance(old: Mapping[str, str]) -> tuple[int, int]:
        differing = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
        return len(differing), sum(not name.startswith(CAPTURED) for name in differing)

    return min(reversed(earlier), key=distance)


def signature_change(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Describes the difference between two signatures.

    Args:
        old: Previous description (`describe_array`) of each input by name.
        new: Current description of each input by name.
    """
    changes = [
        f"{name} was {old[name]}, is {after}"
        for name, after in new.items()
        if name in old and old[name] != after
    ]
    changes += [f"{name} ({after}) is new" for name, after in new.items() if name not in old]
    changes += [f"{name} ({before}) was removed" for name, before in old.items() if name not in new]
    if not changes:
        return "the sharding or the weak type of an argument changed"
    more = f", and {len(changes) - _MAX_CHANGES} more" if len(changes) > _MAX_CHANGES else ""
    return "; ".join(changes[:_MAX_CHANGES]) + more
