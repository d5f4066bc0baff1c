"""Reads the attributes of values that may be arrays, which only some of them have.

Arrays of JAX, NumPy and other libraries, tracers, shapes and wrappers of arrays have no class in
common, and a wrapper may return attributes from `__getattr__`. So the attribute itself is asked
for, and never `isinstance`.
"""

from typing import Any

from jax.core import ShapedArray
from jax.extend import core

from tpudist.array_types import Shape


def has_dtype(value: object) -> bool:
    """Returns whether a value has a dtype, as arrays of all libraries and their shapes have."""
    return hasattr(value, "dtype")


def has_shape(value: object) -> bool:
    """Returns whether a value has a shape. Python numbers, containers and NNX objects have none."""
    return hasattr(value, "shape")


def dtype_of(value: object, otherwise: object = None) -> Any:
    """Returns the dtype of a value, or `otherwise` for one without a dtype."""
    return getattr(value, "dtype", otherwise)


def shape_of(value: object) -> Shape:
    """Returns the shape of a value; `()` for one without a shape, such as a token of JAX."""
    return getattr(value, "shape", ())


def is_weakly_typed(value: object) -> bool:
    """Returns whether a value has a weak type. NumPy's arrays and random keys never have one."""
    return getattr(value, "weak_type", False)


def sharding_of(value: object) -> Any:
    """Returns the sharding of a value; None without one, as for NumPy's arrays and tracers."""
    return getattr(value, "sharding", None)


def array_aval(atom: core.Var | core.Literal) -> ShapedArray:
    """Returns the shape and dtype of an operand or result of a jaxpr that is an array."""
    assert isinstance(atom.aval, ShapedArray), atom.aval
    return atom.aval
