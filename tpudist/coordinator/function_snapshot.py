"""FunctionSnapshot: what a function captures, so that one can tell whether that has changed.

To make bytes of a function takes longer than a small step does. The bytes that were made before are
still those of the function if it captures the same: immutable values that are equal, handles and
whatever modules define that are the same objects, and containers and arrays with the same in them.
Of anything else it is not known, and bytes are made each time.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

MAX_BYTES = 1 << 20
"""Of an array that is compared; larger ones are seldom captured, and take longer to compare."""
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)
_MISSING = object()
_OF_GLOBALS = {dis.opmap[x] for x in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")}
_Compiled = type(jax.jit(lambda: None))
_globals_of_code: weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]] = (
    weakref.WeakKeyDictionary()
)


class FunctionSnapshot:
    """What a function captures, as far as its bytes depend on that."""

    def __init__(self, parts: list[Any]):
        """See `take`."""
        self._parts = parts

    def equals(self, other: FunctionSnapshot) -> bool:
        """Whether bytes made of one function are those of the other."""
        ours, theirs = self._parts, other._parts
        return len(ours) == len(theirs) and all(map(_are_same, ours, theirs))


def take(function: Any, by_value: Collection[str] = ()) -> FunctionSnapshot | None:
    """What a function captures; None where it is not known whether that would be all.

    Args:
        function: Any callable.
        by_value: Modules whose functions are sent as they are, and not by name.
    """
    parts: list[Any] = []
    walk = _Walk(parts, frozenset(by_value) | {"__main__"})
    return FunctionSnapshot(parts) if walk.add(function) else None


def _are_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (float, complex):
        return repr(a) == repr(b)  # 0.0 is equal to -0.0, and NaN not to itself
    return a == b if type(a) in _PLAIN or type(a) is _Array else False


class _Array:
    """An array as it was."""

    __slots__ = ("_bytes", "_what")

    def __init__(self, array: np.ndarray):
        self._what = array.shape, array.dtype, array.strides
        self._bytes = array.tobytes("A")

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Array)
        return self._what == other._what and self._bytes == other._bytes

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class _Walk:
    """Adds what is found to a list, in the order in which it is found."""

    def __init__(self, parts: list[Any], by_value: Collection[str]):
        self._parts, self._by_value = parts, by_value
        self._seen: dict[int, int] = {}  # by `id`, of what may contain itself
        self._alive: list[Any] = []

    def add(self, x: Any) -> bool:
        """Adds a value and what it holds; False if it is of a kind that is not known."""
        kind = type(x)
        if kind in _PLAIN:
            self._parts.append(x)
            return True
        if kind is np.ndarray:
            if x.dtype.hasobject or x.nbytes > MAX_BYTES:
                return False
            self._parts.append(_Array(x))
            return True
        if id(x) in self._seen:
            self._parts.append(self._seen[id(x)])
            return True
        self._seen[id(x)] = len(self._seen)
        self._alive.append(x)  # else another one could have its `id` later in the walk
        if kind in (tuple, list):
            self._parts += [kind, len(x)]
            return all(map(self.add, x))
        if _is_named_tuple(x):
            self._parts.append(len(x))
            return self.add(kind) and all(map(self.add, x))
        if kind is dict:
            self._parts += [kind, len(x)]
            return all(self.add(key) and self.add(value) for key, value in x.items())
        if kind is functools.partial:
            self._parts.append(kind)
            return self.add(x.func) and self.add(x.args) and self.add(x.keywords)
        if kind is types.MethodType:
            self._parts.append(kind)
            return self.add(x.__func__) and self.add(x.__self__)
        if self._is_immutable(x) or self._is_of_module(x):
            self._parts.append(x)
            return True
        if isinstance(handle := getattr(x, "handle_parts", None), tuple):
            self._parts += handle
            return True
        if kind is types.FunctionType:  # another object of one definition may be the same function
            self._parts += [x.__code__, *x.__annotations__, *x.__annotations__.values()]
            return all(map(self.add, _contents(x)))
        if kind is _Compiled:
            self._parts.append(x)
            wrapped = x.__wrapped__
            return type(wrapped) is types.FunctionType and all(map(self.add, _contents(wrapped)))
        return False

    def _is_immutable(self, x: Any) -> bool:
        if isinstance(x, jax.Array):
            return not isinstance(x, Tracer) and not x.is_deleted()
        if isinstance(x, np.generic):
            return not x.dtype.hasobject
        if isinstance(x, enum.Enum):
            return self._is_of_module(type(x))  # else its class is sent as it is
        return isinstance(x, np.dtype)

    def _is_of_module(self, x: Any) -> bool:
        """Whether it is a module, or found under its name in one, and so is sent as that name."""
        if isinstance(x, types.ModuleType):
            return sys.modules.get(x.__name__) is x and self._is_sent_by_name(x.__name__)
        if not isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
            return False  # what it is may differ from one moment to the next
        module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            return False
        found: Any = sys.modules.get(module, _MISSING)
        for part in name.split("."):
            found = getattr(found, part, _MISSING)
        return found is x and self._is_sent_by_name(module)

    def _is_sent_by_name(self, module: str) -> bool:
        parts = module.split(".")
        return not any(".".join(parts[: i + 1]) in self._by_value for i in range(len(parts)))


def _is_named_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and not getattr(x, "__dict__", None)


def _contents(function: types.FunctionType) -> Iterator[Any]:
    """What a function that is sent as it is takes along."""
    yield function.__name__
    yield function.__qualname__
    yield function.__module__
    yield function.__doc__
    yield function.__defaults__
    yield function.__kwdefaults__
    yield function.__dict__
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is bound later
            yield "\0 unbound"
    for name in _names_of_globals(function.__code__):
        yield function.__globals__.get(name, "\0 none")


def _names_of_globals(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function looks up, in it and in functions that it defines."""
    found = _globals_of_code.get(code)
    if found is None:
        names = {x.argval: None for x in dis.get_instructions(code) if x.opcode in _OF_GLOBALS}
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= dict.fromkeys(_names_of_globals(constant))
        found = _globals_of_code[code] = tuple(names)
    return found
