"""The base of objects that are used as an array: a `Variable`, and a component of one.

Arithmetic, comparison and conversion apply to `read_value()`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


# Python looks for an operator in the class and not in the instance, so `__getattr__` could not
# forward them: the class needs a function for each.
def _operator(name: str) -> Any:
    """Returns the operator `name` of the value's array."""

    def operator(self, *others):
        return self._apply(name, [_as_operand(x) for x in others])

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = f"`{name}` of the value."
    return operator


def apply_operator(value: object, operator: str, others: Sequence[object]) -> Any:
    """Returns the result of an operator, such as `__add__`, of an array or a tracer."""
    return getattr(value, operator)(*others)


def _as_operand(x: object) -> Any:
    if isinstance(x, ReadsAsArray):
        return x.read_value()
    return jnp.asarray(x) if isinstance(x, list | tuple) else x


class ReadsAsArray:
    """An object that is used as the array `read_value()`.

    `==` and `!=` compare elementwise, like arrays and `tf.Variable`. The object can still be a key
    of a dict or an element of a set, and is found by identity (`tf.Variable` has `ref()` for that).
    `x += 1` binds the name to an array, and changes no variable.
    """

    __slots__ = ()
    # Above NumPy's arrays (0), whose operators would otherwise convert it to a NumPy array first.
    __array_priority__ = 101

    def __init_subclass__(cls) -> None:
        # Functions of JAX flatten their arguments, so they receive the value. Pass `is_leaf` to
        # `jax.tree` functions to receive the object. Unflattening gives the array, not the object.
        def unflatten(_: None, children: Sequence[Any]) -> Any:
            return children[0]

        jax.tree_util.register_pytree_node(cls, lambda x: ((x.read_value(),), None), unflatten)

    shape: tuple[int, ...]  # known without a read; an attribute or a property of the subclass

    def read_value(self) -> jax.Array:
        """Returns the value."""
        raise NotImplementedError

    def _apply(self, operator: str, others: list[Any]) -> Any:
        return apply_operator(self.read_value(), operator, others)

    def value(self) -> jax.Array:
        """Returns the same as `read_value`."""
        return self.read_value()

    def numpy(self) -> np.ndarray:
        """Returns the value as a NumPy array."""
        return np.asarray(self.read_value())

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    def get_shape(self) -> tuple[int, ...]:
        """Returns `shape`."""
        return self.shape

    def tolist(self) -> Any:
        """Returns the value as nested lists of numbers."""
        return self.numpy().tolist()

    __add__, __radd__ = _operator("__add__"), _operator("__radd__")
    __sub__, __rsub__ = _operator("__sub__"), _operator("__rsub__")
    __mul__, __rmul__ = _operator("__mul__"), _operator("__rmul__")
    __truediv__, __rtruediv__ = _operator("__truediv__"), _operator("__rtruediv__")
    __floordiv__, __rfloordiv__ = _operator("__floordiv__"), _operator("__rfloordiv__")
    __mod__, __rmod__ = _operator("__mod__"), _operator("__rmod__")
    __divmod__, __rdivmod__ = _operator("__divmod__"), _operator("__rdivmod__")
    __pow__, __rpow__ = _operator("__pow__"), _operator("__rpow__")
    __matmul__, __rmatmul__ = _operator("__matmul__"), _operator("__rmatmul__")
    __and__, __rand__ = _operator("__and__"), _operator("__rand__")
    __or__, __ror__ = _operator("__or__"), _operator("__ror__")
    __xor__, __rxor__ = _operator("__xor__"), _operator("__rxor__")
    __lshift__, __rlshift__ = _operator("__lshift__"), _operator("__rlshift__")
    __rshift__, __rrshift__ = _operator("__rshift__"), _operator("__rrshift__")
    __lt__, __le__ = _operator("__lt__"), _operator("__le__")
    __gt__, __ge__ = _operator("__gt__"), _operator("__ge__")
    __eq__, __ne__ = _operator("__eq__"), _operator("__ne__")
    __neg__, __pos__ = _operator("__neg__"), _operator("__pos__")
    __abs__, __invert__ = _operator("__abs__"), _operator("__invert__")
    # A class that defines `__eq__` has no hash unless it names one.
    __hash__ = object.__hash__

    def __getitem__(self, index: object):
        parts = tuple(map(_as_operand, index)) if isinstance(index, tuple) else _as_operand(index)
        return self._apply("__getitem__", [parts])

    def __round__(self, ndigits: int | None = None):
        return round(self.read_value(), ndigits)

    def __jax_array__(self) -> jax.Array:
        return self.read_value()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.read_value(), dtype, copy=copy)

    def __float__(self) -> float:
        return float(self.read_value())

    def __int__(self) -> int:
        return int(self.read_value())

    def __index__(self) -> int:
        # Unlike `int`, it raises for floats.
        return self.read_value().__index__()

    def __complex__(self) -> complex:
        return complex(self.read_value())

    def __bool__(self) -> bool:
        return bool(self.read_value())

    def __len__(self) -> int:
        return len(self.read_value())

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.read_value())

    def __format__(self, spec: str) -> str:
        return format(self.read_value(), spec) if spec else str(self)
