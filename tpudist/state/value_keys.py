"""Keys of Python values: two values with the same key can use the same compiled program.

A program is traced with the contents that an argument has then. If the key were the object's
identity, you could change the object (`config.lr = 2.0`) and the program would silently continue
with the old value. So the key of an object consists of its attributes, and the key of a container
of its items. A mutable object without readable contents raises an error.
"""

import collections
import dataclasses
import sys
import types
from collections.abc import Hashable, Iterable, Mapping

import jax
import numpy as np

from tpudist.state import library_code, nnx_contents

_SIMPLE = frozenset((str, bytes, bool, int, type(None)))
# Largest number of values in one argument. All of them are compared at each call.
MAX_VALUES = 1000
# A larger array is compared by identity. Larger constants of a program raise an error later.
_MAX_ARRAY_BYTES = 1 << 20
# Bounds of the text of `describe`, which is part of one line of the log of compilations.
_MAX_DEPTH, _MAX_ITEMS = 4, 10


class IdentityKey:
    """A key that is equal only for the same object; for values without a hash."""

    __slots__ = ("value",)

    def __init__(self, value: object):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.value is self.value


def key_of(value: object) -> Hashable:
    """Returns the key of a Python value: its type and contents.

    The type counts because 1, 1.0 and True are equal, but need different programs.

    Raises:
        TypeError: If the value is mutable and opaque, or contains more than `MAX_VALUES` values.
    """
    if type(value) in _SIMPLE:
        return type(value), value
    return _KeyBuilder(value).key(value)


def attributes_of(value: object) -> dict[str, object] | None:
    """Returns the attributes that are the contents of an object.

    None if the object is not compared by attributes: a class, an object with a hash of its own, an
    object of a library (a function, a module, a device), or an object without attributes. Fields of
    a frozen dataclass with `compare=False` do not count.
    """
    cls = type(value)
    if isinstance(value, (type, *nnx_contents.OBJECT_TYPES)):
        return None
    hash_method = cls.__hash__
    is_dataclass = dataclasses.is_dataclass(value)
    if is_dataclass and _is_generated(hash_method):
        # Its own hash and `==` are not used: for them 1 equals True, and NaN differs from itself.
        fields = [f for f in dataclasses.fields(value) if (f.compare if f.hash is None else f.hash)]
        return _read_attributes(value, [field.name for field in fields])
    has_hash_of_contents = hash_method not in (None, object.__hash__)
    if has_hash_of_contents or (hash_method is not None and _is_of_library(cls)):
        return None
    if is_dataclass:
        return _read_attributes(value, [field.name for field in dataclasses.fields(value)])
    slots = [
        name
        for base in cls.__mro__
        for name in _as_tuple(base.__dict__.get("__slots__", ()))
        if not name.startswith("__") and hasattr(value, name)  # a slot may be empty
    ]
    own = getattr(value, "__dict__", None)  # None for an object with slots only
    return None if own is None and not slots else _read_attributes(value, slots) | dict(own or {})


def _read_attributes(value: object, names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(value, name) for name in names}  # fields and slots of your class


def describe(value: object, depth: int = _MAX_DEPTH) -> str:
    """Returns a text with the contents of a Python value, down to `depth` levels."""
    if isinstance(value, str | int | float | complex | None):
        return repr(value)
    if depth and isinstance(value, np.ndarray) and value.size <= _MAX_ITEMS:
        return str(value.tolist())
    attributes = attributes_of(value)
    if attributes is not None and depth:
        items = [f"{name}={describe(x, depth - 1)}" for name, x in attributes.items()]
    elif depth and isinstance(value, Mapping):
        items = [f"{key!r}: {describe(x, depth - 1)}" for key, x in value.items()]
    elif depth and isinstance(value, list | tuple | set | frozenset | collections.deque):
        items = [describe(x, depth - 1) for x in value]
    else:
        return type(value).__name__
    more = ", ..." if len(items) > _MAX_ITEMS else ""
    return f"{type(value).__name__}({', '.join(items[:_MAX_ITEMS])}{more})"


def _is_generated(hash_method: object) -> bool:
    """Whether the `dataclasses` module made a `__hash__`: it compiles the method from text."""
    if not isinstance(hash_method, types.FunctionType):
        return False
    return hash_method.__code__.co_filename == "<string>"


def _as_tuple(slots: str | Iterable[str]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_of_library(cls: type) -> bool:
    if library_code.root_package(cls) in sys.stdlib_module_names:
        return True
    return any(
        library_code.root_package(base) in library_code.OPAQUE_PACKAGES for base in cls.__mro__
    )


class _KeyBuilder:
    """Computes the key of one argument, recursively."""

    def __init__(self, argument: object):
        self._argument = argument
        self._num_values = 0
        # Ids of the values that contain the present one. A value that contains itself is known by
        # identity there, so the recursion ends.
        self._ancestors: set[int] = set()

    def key(self, value: object) -> Hashable:
        """Returns the key of `value`, which is the argument or a part of it."""
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
        if id(value) in self._ancestors:
            return cls, IdentityKey(value)
        self._ancestors.add(id(value))
        try:
            return cls, self._contents(value)
        finally:
            self._ancestors.discard(id(value))

    def _contents(self, value: object) -> Hashable:
        if isinstance(value, np.ndarray | np.generic):  # by its bytes, as `repr` above
            if value.nbytes > _MAX_ARRAY_BYTES or value.dtype.hasobject:
                return IdentityKey(value)
            return value.shape, str(value.dtype), value.tobytes()
        if isinstance(value, set | frozenset):
            return frozenset(map(self.key, value))
        if isinstance(value, Mapping):
            # In their order: a function may iterate over the items.
            return tuple((self.key(k), self.key(x)) for k, x in value.items())
        if isinstance(value, tuple | list | collections.deque):
            return tuple(map(self.key, value))
        if isinstance(value, slice):  # Python 3.11 has no hash for it
            return self.key(value.start), self.key(value.stop), self.key(value.step)
        if isinstance(value, bytearray):
            return bytes(value)
        attributes = attributes_of(value)
        if attributes is not None:
            items = tuple((name, self.key(x)) for name, x in attributes.items())
            # An object that compares by identity may have state that is not an attribute, so the
            # identity counts too.
            by_identity = type(value).__hash__ is object.__hash__
            return (IdentityKey(value), items) if by_identity else items
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
