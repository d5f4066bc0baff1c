"""FunctionSnapshot: the values that a function captures, to find out whether they have changed.

Serializing a function takes longer than a small step. Two snapshots are equal only if the function
would serialize to the same bytes: its immutable values are equal, its handles and everything that
modules define are the same objects, and its containers and arrays have the same contents. For any
other captured object there is no snapshot, and the function is serialized each time.
"""

from __future__ import annotations

import dis
import enum
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

MAX_BYTES = 1 << 20
"""Largest array that is compared; functions seldom capture larger ones, and comparing takes longer.
"""
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)
_MISSING = object()
_OF_GLOBALS = {dis.opmap[x] for x in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")}
_Compiled = type(jax.jit(lambda: None))
# Cache: disassembling takes longer than all other steps of a snapshot. Equal code objects share an
# entry, because they look up the same names.
_globals_of_code: weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]] = (
    weakref.WeakKeyDictionary()
)


class FunctionSnapshot:
    """The captured values of a function; see `take`."""

    def __init__(self, parts: list[object]):
        self._parts = parts

    def equals(self, other: FunctionSnapshot) -> bool:
        """Returns whether both functions serialize to the same bytes."""
        ours, theirs = self._parts, other._parts
        return len(ours) == len(theirs) and all(map(_are_same, ours, theirs))


def take(function: Callable[..., Any], by_value: Collection[str] = ()) -> FunctionSnapshot | None:
    """Returns a snapshot of a function; None if it captures a value of an unknown kind.

    Args:
        function: Any callable.
        by_value: Modules whose functions are serialized completely, and not by name.
    """
    parts: list[object] = []
    # cloudpickle always serializes functions of `__main__` completely.
    walk = _Walk(parts, frozenset(by_value) | {"__main__"})
    return FunctionSnapshot(parts) if walk.add(function) else None


def _are_same(a: object, b: object) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (float, complex):
        return repr(a) == repr(b)  # 0.0 is equal to -0.0, and NaN not to itself
    return type(a) in _COMPARED and a == b


class _Mark(NamedTuple):
    """A part of a snapshot that no captured value can equal.

    Attributes:
        kind: Kind of the container or function that begins here, or a name.
        number: Number of its contents, or order of an object that was met before.
    """

    kind: object
    number: int = 0


_UNBOUND, _NO_GLOBAL = _Mark("unbound"), _Mark("no global")


class _Array:
    """A copy of an array."""

    __slots__ = ("_bytes", "_layout")

    def __init__(self, array: np.ndarray):
        self._layout = array.shape, array.dtype, array.strides
        self._bytes = array.tobytes("A")

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Array)
        return self._layout == other._layout and self._bytes == other._bytes

    __hash__ = None  # pyright: ignore[reportAssignmentType]


_COMPARED = {*_PLAIN, _Array, _Mark}  # kinds that are compared by `==`


# A snapshot is a flat list: the leaves that a depth-first walk meets, and marks with the kinds and
# lengths of containers. Two walks give equal lists only if they met the same structure. An object
# that was met before is replaced by a mark with its order, so cycles end, and two references to one
# list differ from two equal lists: changing one of them would have another effect. Wrong "equal"
# would run stale code; wrong "different" only costs a serialization, so every doubt returns False.


class _Walk:
    """Appends what it finds to a list, in a fixed order."""

    def __init__(self, parts: list[object], by_value: Collection[str]):
        self._parts, self._by_value = parts, by_value
        self._seen: dict[int, int] = {}  # `id` -> order; containers may contain themselves
        self._alive: list[object] = []

    def add(self, x: Any) -> bool:
        """Appends a value and its contents; returns False if its kind is unknown."""
        kind = type(x)
        if kind in _PLAIN or kind is _Mark:
            self._parts.append(x)
            return True
        if kind is np.ndarray:
            if x.dtype.hasobject or x.nbytes > MAX_BYTES:
                return False
            self._parts.append(_Array(x))
            return True
        if id(x) in self._seen:
            self._parts.append(_Mark("again", self._seen[id(x)]))
            return True
        self._seen[id(x)] = len(self._seen)
        self._alive.append(x)  # otherwise a later temporary could get the same `id`
        contents = self._begin(x)
        return contents is not None and all(map(self.add, contents))

    def _begin(self, x: Any) -> Iterable[object] | None:
        """Appends what identifies an object; returns its contents, or None if it is unknown."""
        kind = type(x)
        if kind in (tuple, list):
            self._parts.append(_Mark(kind, len(x)))
            return x
        if _is_named_tuple(x):
            self._parts.append(_Mark("named tuple", len(x)))
            return kind, *x
        if kind is dict:
            self._parts.append(_Mark(kind, len(x)))
            return itertools.chain.from_iterable(x.items())
        if kind is functools.partial:
            self._parts.append(_Mark(kind))
            return x.func, x.args, x.keywords
        if kind is types.MethodType:
            self._parts.append(_Mark(kind))
            return x.__func__, x.__self__
        # Immutable objects, and objects that a module defines, are compared by identity.
        if self._is_immutable(x) or self._is_of_module(x):
            self._parts.append(x)
            return ()
        # Variables, optimizers, tables and strategies have this property.
        if isinstance(handle := getattr(x, "handle_parts", None), tuple):
            self._parts += handle
            return ()
        if kind is types.FunctionType:
            # A loop that defines a function creates a new object from the same code each time.
            annotations = x.__annotations__
            self._parts += [_Mark(kind, len(annotations)), x.__code__]
            self._parts += [*annotations, *annotations.values()]
            return _contents(x)
        if kind is _Compiled and type(x.__wrapped__) is types.FunctionType:
            # A jitted function: the same object, but what its Python function captures may change.
            self._parts.append(x)
            return _contents(x.__wrapped__)
        return None

    def _is_immutable(self, x: object) -> bool:
        if isinstance(x, jax.Array):
            return not isinstance(x, Tracer) and not x.is_deleted()
        if isinstance(x, np.generic):
            return not x.dtype.hasobject
        if isinstance(x, enum.Enum):
            return self._is_of_module(type(x))  # otherwise its class is serialized completely
        return isinstance(x, np.dtype)

    def _is_of_module(self, x: object) -> bool:
        """Returns whether a module defines `x` under its name, so that its name is serialized."""
        if isinstance(x, types.ModuleType):
            return sys.modules.get(x.__name__) is x and self._is_sent_by_name(x.__name__)
        if not isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
            return False  # an instance may change while its module does not
        # Builtin functions and dynamic classes may lack these attributes.
        module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            return False
        # The path that `pickle` follows when it reads a name.
        found: object = sys.modules.get(module, _MISSING)
        for part in name.split("."):
            found = getattr(found, part, _MISSING)
        return found is x and self._is_sent_by_name(module)

    def _is_sent_by_name(self, module: str) -> bool:
        parts = module.split(".")
        return not any(".".join(parts[: i + 1]) in self._by_value for i in range(len(parts)))


def _is_named_tuple(x: Any) -> bool:
    # A subclass of tuple without attributes of its own: its elements are all of its state.
    return isinstance(x, tuple) and not getattr(x, "__dict__", None)


def _contents(function: types.FunctionType) -> Iterator[Any]:
    """Yields everything that cloudpickle serializes with a function, except its code."""
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
        except ValueError:  # a variable that the enclosing function assigns later
            yield _UNBOUND
    # Only names that the code looks up are serialized with a function, not all of its module.
    for name in _names_of_globals(function.__code__):
        yield function.__globals__.get(name, _NO_GLOBAL)


def _names_of_globals(code: types.CodeType) -> tuple[str, ...]:
    """Returns the globals that a function, or a function that it defines, looks up."""
    found = _globals_of_code.get(code)
    if found is None:
        names = {x.argval: None for x in dis.get_instructions(code) if x.opcode in _OF_GLOBALS}
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= dict.fromkeys(_names_of_globals(constant))
        found = _globals_of_code[code] = tuple(names)
    return found
