"""Compares a function's captured Python values with the values at the traces of its programs.

A program contains the values that `self.training`, a closure's `lr` or a module's constant had at
its trace. `capture_search.find` returns the places of such values. `Snapshot` compares them at each
call: quickly by identity, in one compiled expression, and only if that fails by value.

A value that the trace itself changes, such as a counter of traces, is not compared.
"""

import collections
import copy
import enum
import functools
import operator
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from tpudist.state import value_keys
from tpudist.xla import descriptions

SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic, enum.Enum)
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_MISSING = object()


class Place:
    """A captured value and the expression that reads it.

    Attributes:
        name: Name of the value in the function, for messages.
        expression: Python text that gives the value, of a function `fn`.
        value: The value at the trace: a scalar or a container of scalars, or a weak reference to
            an object.
        is_weak: Whether `value` is a weak reference. A program must not keep the objects that its
            function captures alive.
    """

    __slots__ = ("expression", "is_weak", "name", "value")

    def __init__(self, name: str, expression: str, value: object, *, is_weak: bool):
        self.name, self.expression, self.is_weak = name, expression, is_weak
        self.value = weakref.ref(value) if is_weak else value

    def comparison(self, variable: str) -> str:
        """Returns a Python expression that compares the present value with that of `variable`.

        It compares by identity, also the items of a container: 1 and 1.0 are equal, but need
        different programs.
        """
        if self.is_weak:
            return f"{self.expression} is {variable}()"
        if isinstance(self.value, CONTAINERS):
            return f"has_same_items({self.expression}, {variable})"
        # `len(...)` returns a new integer at each call.
        operation = "==" if self.expression.startswith("len(") else "is"
        return f"{self.expression} {operation} {variable}"

    def matches(self, value: object) -> bool:
        """Whether `value` equals the value at the trace."""
        if isinstance(self.value, weakref.ref):
            return self.value() is value
        return value is self.value or _key(value) == _key(self.value)


class Snapshot:
    """The captured values with which some programs of a function were traced.

    Attributes:
        places: The places, by their expressions.
        is_same: Called with the function; returns whether each place holds the very same object.
            False does not mean that a value changed: then call `fits`. None without places.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.is_same: Callable[[Callable[..., object]], bool] | None = None
        # Globals of `is_same`, with the values of the places as v0, v1, ...
        self._globals: dict[str, Any] = {"has_same_items": _has_same_items}
        self._num_compared = 0  # number of places in the expression of `is_same`

    def add(self, before: dict[str, Place], fn: Callable[..., object]) -> None:
        """Adds places that were found before a trace, if the trace did not change their values.

        A value that the trace changes itself (a counter, an attribute that is created when it is
        first read) would never match again.
        """
        for expression, place in before.items():
            if expression not in self.places and place.matches(_read(expression, fn)):
                self.places[expression] = place
        self._prepare()

    def fits(self, fn: Callable[..., object]) -> bool:
        """Whether all values equal the values at the trace.

        If so, the present objects replace the equal ones in `is_same`, which compares identities.
        """
        values = {}
        for expression, place in self.places.items():
            value = values[place] = _read(expression, fn)
            if not place.matches(value):
                return False
        for place, value in values.items():
            if not place.is_weak:
                # A container is copied, because your program may change it in place later.
                place.value = copy.copy(value) if isinstance(value, CONTAINERS) else value
        self._prepare()
        return True

    def describe(self) -> dict[str, str]:
        """Returns the scalars by name, for the log of compilations."""
        scalars = (p for p in self.places.values() if not p.is_weak)
        return {f"{descriptions.CAPTURED}{p.name}": f"the value {p.value!r}" for p in scalars}

    def _prepare(self) -> None:
        places = self.places.values()
        values = {f"v{i}": place.value for i, place in enumerate(places)}
        if len(values) > self._num_compared:
            # One function with one expression: a loop over the places takes ten times as long, and
            # `run` calls it at each step. An expression may raise, if you deleted an attribute.
            tests = [p.comparison(name) for p, name in zip(places, values, strict=True)]
            lines = ["def is_same(fn):", " try:", f"  return {' and '.join(tests)}"]
            exec("\n".join([*lines, " except Exception:", "  return False"]), self._globals)
            self.is_same, self._num_compared = self._globals["is_same"], len(values)
        self._globals.update(values)


def _has_same_items(value: Any, earlier: Any) -> bool:
    """Whether a container has the very same items as its earlier copy, in the same order."""
    if type(value) is not type(earlier) or len(value) != len(earlier):
        return False
    if isinstance(value, set | frozenset):  # a copy may have another order
        return {*map(id, value)} == {*map(id, earlier)}
    if isinstance(value, dict) and not all(map(operator.is_, value.values(), earlier.values())):
        return False
    return all(map(operator.is_, value, earlier))


def _read(expression: str, fn: Callable[..., object]) -> object:
    try:
        return eval(_compile(expression), {}, {"fn": fn})
    except Exception:  # the expression reads attributes of your objects, which may raise anything
        return _MISSING


@functools.lru_cache(maxsize=4096)
def _compile(expression: str) -> types.CodeType:
    return compile(expression, "<captured value>", "eval")


def _key(value: object) -> Hashable:
    """Returns a key that is equal for equal values; a unique one if it cannot be compared."""
    is_known = isinstance(value, (*SCALARS, *CONTAINERS))
    try:
        return value_keys.key_of(value) if is_known else object()
    except TypeError:  # a container with a value that cannot be compared
        return object()
