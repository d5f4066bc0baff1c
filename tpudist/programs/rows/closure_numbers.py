"""Finds the numbers that a function closes over."""

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpudist.xla.array_attributes import has_shape


def numbers_in_closure(function: Callable) -> tuple[int | float, ...]:
    """Returns the numbers that a function closes over, and the sizes of the arrays."""
    # A kernel is one primitive, so the labels do not see the numbers in it. A number that the
    # function closes over may be the number of rows; a global number cannot be.
    numbers: list[int | float] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:  # any object that a user's function refers to
        if isinstance(value, int | float):
            numbers.append(value)
            return
        if has_shape(value):  # an array of any library
            numbers.extend(value.shape)
            return
        # Ends, since each object is visited once: a function may close over itself.
        if id(value) in seen:
            return
        seen.add(id(value))
        for content in _contents_of(value):
            visit(content)

    visit(function)
    return tuple(numbers)


def _contents_of(value: object) -> Sequence[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.isfunction(value):
        # A cell is empty while the function that it will contain is not defined yet.
        filled = [cell for cell in value.__closure__ or () if cell != types.CellType()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*(cell.cell_contents for cell in filled), *defaults]
    if (wrapped := getattr(value, "__wrapped__", None)) is not None:  # a user's decorator
        return [wrapped]
    return () if jax.tree_util.all_leaves([value]) else jax.tree.leaves(value)
