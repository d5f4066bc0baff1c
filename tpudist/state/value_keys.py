"""What a Python value among the arguments is to the identity of a program: what it holds now.

A program is traced with what an object held then. Known by its identity alone, the object could be
changed (`config.lr = 2.0`), and the program would go on with the old value and say nothing. So an
object that compares by identity counts with its attributes, and one that cannot be hashed by what
it holds. What cannot be looked into is refused.
"""

import collections
import dataclasses
import sys
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np

from tpudist.state import nnx_contents

_SIMPLE = frozenset((str, bytes, bool, int, type(None)))
# Objects of these are looked at when they are used, or do not change: functions, modules, devices.
_LIBRARIES = frozenset(("tpudist", "jax", "jaxlib", "flax", "optax", "numpy"))
# Of one argument. It is compared at each call.
MAX_VALUES = 1000
_MAX_ARRAY_BYTES = 1 << 20  # larger constants of a program are refused


class IdentityKey:
    """Makes an unhashable value part of a key, as the object it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        """Holds `value`."""
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.value is self.value


def key_of(value: Any) -> Hashable:
    """The key of a Python value: its type (1, 1.0 and True are different programs), and contents.

    Raises:
        TypeError: It can change, and cannot be looked into.
    """
    if type(value) in _SIMPLE:
        return type(value), value
    return _Contents(value).key(value)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object holds that is known by its attributes; None if it is known otherwise."""
    cls = type(value)
    if isinstance(value, type) or isinstance(value, nnx_contents.OBJECT_TYPES):
        return None
    hashed: Any = cls.__hash__
    if dataclasses.is_dataclass(value) and _belongs_to_dataclass(hashed):
        # By field: 1 and True are equal, and NaN is not.
        fields = [f for f in dataclasses.fields(value) if (f.compare if f.hash is None else f.hash)]
        return {field.name: getattr(value, field.name) for field in fields}
    if hashed is not None and (hashed is not object.__hash__ or _is_of_library(cls)):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    slots = [
        name
        for base in cls.__mro__
        for name in _as_tuple(base.__dict__.get("__slots__", ()))
        if not name.startswith("__") and hasattr(value, name)
    ]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return {name: getattr(value, name) for name in slots} | dict(getattr(value, "__dict__", {}))


def describe(value: Any, depth: int = 4) -> str:
    """What a Python value holds, in words."""
    if isinstance(value, str | int | float | complex | None):
        return repr(value)
    if depth and isinstance(value, np.ndarray) and value.size <= 10:
        return str(value.tolist())
    attributes = attributes_of(value)
    if attributes is not None and depth:
        held = [f"{name}={describe(x, depth - 1)}" for name, x in attributes.items()]
    elif depth and isinstance(value, Mapping):
        held = [f"{key!r}: {describe(x, depth - 1)}" for key, x in value.items()]
    elif depth and isinstance(value, list | tuple | set | frozenset | collections.deque):
        held = [describe(x, depth - 1) for x in value]
    else:
        return type(value).__name__
    more = ", ..." if len(held) > 10 else ""
    return f"{type(value).__name__}({', '.join(held[:10])}{more})"


def _belongs_to_dataclass(hashed: Any) -> bool:
    """Whether a `__hash__` is that of a frozen dataclass, which is made of text."""
    return getattr(getattr(hashed, "__code__", None), "co_filename", None) == "<string>"


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_of_library(cls: type) -> bool:
    """Whether objects of a class are no user's own to change."""
    if _root(cls) in sys.stdlib_module_names:
        return True
    return any(_root(base) in _LIBRARIES for base in cls.__mro__)


def _root(cls: type) -> str:
    return cls.__module__.partition(".")[0]


class _Contents:
    """Looks into one argument."""

    def __init__(self, argument: Any):
        self._argument = argument
        self._num_values = 0
        self._under_way: set[int] = set()

    def key(self, value: Any) -> Hashable:
        """The key of `value`, which the argument holds or is."""
        cls = type(value)
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise TypeError(
                f"A replica function received an object of type {type(self._argument).__name__} "
                f"that holds more than {MAX_VALUES} values. These values are part of the program, "
                f"so each call would compare all of them. {_REMEDY}"
            )
        if cls in _SIMPLE:
            return cls, value
        if isinstance(value, float | complex):
            return cls, repr(value)  # 0.0 equals -0.0, and NaN does not equal itself
        if isinstance(value, (*nnx_contents.OBJECT_TYPES, jax.Array)):
            return cls, IdentityKey(value)
        if id(value) in self._under_way:
            return cls, IdentityKey(value)
        self._under_way.add(id(value))
        try:
            return cls, self._contents(value)
        finally:
            self._under_way.discard(id(value))

    def _contents(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.nbytes > _MAX_ARRAY_BYTES or value.dtype.hasobject:
                return IdentityKey(value)
            return value.shape, str(value.dtype), value.tobytes()
        if isinstance(value, set | frozenset):
            return frozenset(map(self.key, value))
        if isinstance(value, Mapping):
            return tuple((self.key(k), self.key(x)) for k, x in value.items())
        if isinstance(value, tuple | list | collections.deque):
            return tuple(map(self.key, value))
        if isinstance(value, slice):  # which Python 3.11 does not hash
            return self.key(value.start), self.key(value.stop), self.key(value.step)
        if isinstance(value, bytearray):
            return bytes(value)
        attributes = attributes_of(value)
        if attributes is not None:
            held = tuple((name, self.key(x)) for name, x in attributes.items())
            by_identity = type(value).__hash__ is object.__hash__
            return (IdentityKey(value), held) if by_identity else held
        try:
            hash(value)
        except TypeError:
            inner = "" if value is self._argument else f" (in a {type(self._argument).__name__})"
            raise TypeError(
                f"A replica function received an object of type {type(value).__name__}{inner}. The "
                "object is mutable (it has no hash) and opaque, so the program would keep the "
                f"values that it holds now. {_REMEDY}"
            ) from None
        return value


_REMEDY = (
    "Pass a frozen dataclass or a tuple of the values that the function needs, or the numbers and "
    "arrays themselves (in a dict, or a dataclass of jax.tree_util.register_dataclass)."
)
