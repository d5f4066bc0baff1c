"""Compares a function's captured Python values with the values at the traces of its programs.

A program contains the values that `self.training`, a closure's `lr` or a module's constant had at
its trace. `capture_search.find` returns the places of such values. `Snapshot` compares them at each
call: first by identity, in one compiled expression.

A value that the trace itself changes, such as a counter of traces, is not compared.
"""

import collections
import copy
import enum
import functools
import types
import weakref
from collections.abc import Callable, Hashable

import numpy as np

from tpudist.state import value_keys
from tpudist.xla import compile_log

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

        It compares by identity, except where the expression makes a new object.
        """
        if self.is_weak:
            return f"{self.expression} is {variable}()"
        is_new = self.expression.endswith(")") or isinstance(self.value, CONTAINERS)
        return f"{self.expression} {'==' if is_new else 'is'} {variable}"

    def matches(self, value: object) -> bool:
        """Whether `value` equals the value at the trace."""
        if isinstance(self.value, weakref.ref):
            return self.value() is value
        return value is self.value or _key(value) == _key(self.value)


class Snapshot:
    """The captured values with which some programs of a function were traced.

    Attributes:
        places: The places, by their expressions.
        is_same: Quick test, called with the function; None as long as there are no places. If it
            returns False, values may still be equal: then `fits` compares them thoroughly.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.is_same: Callable[[Callable[..., object]], bool] | None = None
        self._names: dict[str, object] = {}  # globals of `is_same`: the values v0, v1, ...

    def add(self, before: dict[str, Place], fn: Callable[..., object]) -> None:
        """Adds places that were found before a trace, if the trace did not change their values."""
        for expression, place in before.items():
            if expression not in self.places and place.matches(_read(expression, fn)):
                self.places[expression] = place
        self._prepare()

    def fits(self, fn: Callable[..., object]) -> bool:
        """Whether all values equal the values at the trace.

        If so, the present objects replace the equal ones in `is_same`, which compares identities.
        """
        found = {}
        for expression, place in self.places.items():
            value = found[place] = _read(expression, fn)
            if not place.matches(value):
                return False
        for place, value in found.items():
            if not place.is_weak:
                # A container is copied, because your program may change it in place later.
                place.value = copy.copy(value) if isinstance(value, CONTAINERS) else value
        self._prepare()
        return True

    def describe(self) -> dict[str, str]:
        """Returns the scalars by name, for the log of compilations."""
        scalars = (p for p in self.places.values() if not p.is_weak)
        return {f"{compile_log.CAPTURED}{p.name}": f"the value {p.value!r}" for p in scalars}

    def _prepare(self) -> None:
        places = self.places.values()
        names = {f"v{i}": place.value for i, place in enumerate(places)}
        if len(names) > len(self._names):
            # One function with one expression: a loop over the places takes ten times as long, and
            # `run` calls it at each step. An expression may raise, if you deleted an attribute.
            tests = [p.comparison(name) for p, name in zip(places, names, strict=True)]
            lines = ["def is_same(fn):", " try:", f"  return {' and '.join(tests)}"]
            exec("\n".join([*lines, " except Exception:", "  return False"]), self._names)
            self.is_same = self._names["is_same"]  # type: ignore[assignment]
        self._names.update(names)


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
    if isinstance(value, np.generic):
        return type(value), repr(value)  # NaN does not equal itself
    is_known = isinstance(value, (*SCALARS, *CONTAINERS))
    try:
        return value_keys.key_of(value) if is_known else object()
    except TypeError:  # a container with a value that cannot be compared
        return object()
