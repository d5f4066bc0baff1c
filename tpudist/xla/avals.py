"""Reads the shape and dtype of a variable or a literal of a jaxpr."""

from jax.core import ShapedArray
from jax.extend import core


def array_aval(atom: core.Var | core.Literal) -> ShapedArray:
    """Returns the shape and dtype of an operand or result that is an array."""
    assert isinstance(atom.aval, ShapedArray), atom.aval
    return atom.aval
