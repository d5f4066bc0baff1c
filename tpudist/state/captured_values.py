"""Captured Python values that programs of a function were traced with, compared at each call.

A program holds what `self.training`, a closure's `lr` or a module's constant was when it was
traced. `capture_search.find` gives the places of such values. `Snapshot` compares them: by identity
first, in one expression that is made once.

A value that the trace itself changes, such as a counter of traces, is left out.
"""

import collections
import copy
import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from tpudist.state import value_keys
from tpudist.xla import compile_log

SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic, enum.Enum)
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_MISSING = object()


class Place:
    """Where a captured value is.

    Attributes:
        name: What the function calls it, for messages.
        expression: Python text that gives the value, of a function `fn`.
        value: What it was: a scalar, or a weak reference to an object.
    """

    __slots__ = ("expression", "is_weak", "name", "value")

    def __init__(self, name: str, expression: str, value: Any, *, is_weak: bool):
        """See the class."""
        self.name, self.expression, self.is_weak = name, expression, is_weak
        self.value = weakref.ref(value) if is_weak else value

    @property
    def comparison(self) -> str:
        """Operator of the quick comparison: identity, unless the expression makes a new object."""
        is_new = self.expression.endswith(")") or isinstance(self.value, CONTAINERS)
        return "==" if is_new else "is"


class Snapshot:
    """The captured values that some programs of a function were traced with."""

    def __init__(self) -> None:
        """No values yet, so that it fits any function."""
        self.places: dict[str, Place] = {}
        self.is_same: Callable[[Any], bool] | None = None
        self._names: dict[str, Any] = {}  # that `is_same` reads

    def add(self, before: dict[str, Place], fn: Callable[..., Any]) -> None:
        """Adds the places that were found before a trace, except those that the trace changed."""
        for expression, place in before.items():
            if expression not in self.places and _is_as_before(place, _read(expression, fn)):
                self.places[expression] = place
        self._prepare()

    def fits(self, fn: Callable[..., Any]) -> bool:
        """Whether all values are what they were; makes `is_same` know equal ones by identity."""
        found = {}
        for expression, place in self.places.items():
            value = found[place] = _read(expression, fn)
            if not _is_as_before(place, value):
                return False
        for place, value in found.items():
            if not place.is_weak:
                place.value = copy.copy(value) if isinstance(value, CONTAINERS) else value
        self._prepare()
        return True

    def describe(self) -> dict[str, str]:
        """The scalars by name, for the log of compiles."""
        scalars = (p for p in self.places.values() if not p.is_weak)
        return {f"{compile_log.CAPTURED}{p.name}": f"the value {p.value!r}" for p in scalars}

    def _prepare(self) -> None:
        places = self.places.values()
        names = {f"v{i}": place.value for i, place in enumerate(places)}
        if len(names) > len(self._names):
            # One function of one expression: a loop over the places would take ten times as long.
            tests = [
                f"{p.expression} {p.comparison} v{i}{'()' if p.is_weak else ''}"
                for i, p in enumerate(places)
            ]
            lines = ["def is_same(fn):", " try:", f"  return {' and '.join(tests)}"]
            exec("\n".join([*lines, " except Exception:", "  return False"]), self._names)
            self.is_same = self._names["is_same"]
        self._names.update(names)


def _read(expression: str, fn: Callable[..., Any]) -> Any:
    try:
        return eval(_compile(expression), {}, {"fn": fn})
    except Exception:
        return _MISSING


@functools.lru_cache(maxsize=4096)
def _compile(expression: str) -> types.CodeType:
    return compile(expression, "<captured value>", "eval")


def _is_as_before(place: Place, value: Any) -> bool:
    if place.is_weak:
        return place.value() is value
    return value is place.value or _key(value) == _key(place.value)


def _key(value: Any) -> Any:
    if isinstance(value, np.generic):
        return type(value), repr(value)  # NaN does not equal itself
    is_known = isinstance(value, (*SCALARS, *CONTAINERS))
    try:
        return value_keys.key_of(value) if is_known else object()
    except TypeError:  # it holds a value that cannot be compared
        return object()
