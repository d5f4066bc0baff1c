"""Python values that a function captures and its program is traced with, compared at each call.

A program holds what `self.training`, a closure's `lr` or a module's constant was when it was
traced. `find` follows the names in the function's code, and in the code of what it calls, to such
values. `Snapshot` compares them: by identity first, in one expression that is made once.

A value that the trace itself changes, such as a counter of traces, is left out. What libraries
capture is not followed, nor a value that code computes before it takes an attribute of it. Arrays
and objects of libraries are known by identity: what is changed in them is not seen.
"""

import collections
import copy
import enum
import functools
import inspect
import operator
import os
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpudist.state import nnx_contents, value_keys
from tpudist.state.code_reads import CodeReads, Read, reads_of

MAX_VALUES = 1000
"""Values of one function, or of one container, that are looked at; more are left out."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic, enum.Enum)
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
# Methods of these that read nothing of what they hold.
_MUTATORS = frozenset(
    "add append appendleft clear discard extend insert pop popitem popleft remove update".split()
)
_OF_SHAPE = frozenset(("dtype", "itemsize", "nbytes", "ndim", "shape", "size"))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_OURS = frozenset(("tpudist", "jax", "jaxlib", "flax", "optax", "numpy"))
_LIBRARIES = (
    *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]) + os.sep,
    "<frozen",
)
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
        is_new = self.expression.endswith(")") or isinstance(self.value, _CONTAINERS)
        return "==" if is_new else "is"


class Snapshot:
    """The captured values that some programs of a function were traced with."""

    def __init__(self) -> None:
        """No values yet, so that it fits any function."""
        self.places: dict[str, Place] = {}
        self.is_same: Callable[[Any], bool] | None = None
        self._names: dict[str, Any] = {}  # that `is_same` reads

    def add(self, before: dict[str, Place], fn: Callable[..., Any]) -> None:
        """Adds the places that `find` gave before a trace, except those that the trace changed."""
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
                place.value = copy.copy(value) if isinstance(value, _CONTAINERS) else value
        self._prepare()
        return True

    def describe(self) -> dict[str, str]:
        """The scalars by name, for the log of compiles."""
        scalars = (p for p in self.places.values() if not p.is_weak)
        return {f"captured {p.name}": f"the value {p.value!r}" for p in scalars}

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


def find(fn: Callable[..., Any]) -> dict[str, Place]:
    """Returns the places of the values that `fn` captures, by their expressions."""
    walk = _Walk()
    walk.visit("fn", fn, "")
    walk.finish()
    return walk.places


class _Walk:
    """Follows the code of a function, with each name's value and the expression that gives it."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self._seen: set[Any] = set()
        self._names: set[str] = set()
        # Objects that the code hands on whole: only the names of the attributes it reads are known.
        self._objects: dict[int, tuple[str, Any, str]] = {}

    def finish(self) -> None:
        """Looks into the objects that are handed on, until nothing new is found."""
        known = -1
        while known != (known := len(self._names) + len(self._objects)):
            for expression, value, name in list(self._objects.values()):
                self._visit_attributes(expression, value, name)

    def visit(self, expression: str, value: Any, name: str) -> None:
        """Looks at a value that code uses as a whole."""
        if len(self._seen) + len(self.places) > MAX_VALUES:
            return
        if isinstance(value, _SCALARS):
            self._add(expression, value, name, is_weak=False)
            return
        if (expression, id(value)) in self._seen:
            return
        self._seen.add((expression, id(value)))
        if isinstance(value, types.MethodType):
            owner = (f"{expression}.__self__", value.__self__, _owner_name(value))
            self._add(expression, value, name, is_weak=True)
            function, at = value.__func__, f"{expression}.__func__"
            if not isinstance(function, types.FunctionType):  # as of `jax.jit`
                function, at = getattr(function, "__wrapped__", None), f"{at}.__wrapped__"
            if isinstance(function, types.FunctionType):
                self._visit_function(at, function, owner)
        elif isinstance(value, types.FunctionType):
            self._add(expression, value, name, is_weak=True)
            self._visit_function(expression, value)
        elif isinstance(value, functools.partial):
            self._add(expression, value, name, is_weak=True)
            self._visit_partial(expression, value, name)
        elif isinstance(value, jax.Array | np.ndarray):
            self._add(expression, value, name, is_weak=True)
        elif isinstance(value, types.MappingProxyType):
            self._visit_container(f"dict({expression})", dict(value), name)
        elif isinstance(value, _CONTAINERS):
            self._visit_container(expression, value, name)
        elif isinstance(value, type):
            if _is_of_program(value):
                init = inspect.getattr_static(value, "__init__", None)
                if isinstance(init, types.FunctionType):
                    self._visit_function(f"{expression}.__init__", init)
        elif callable(inner := inspect.getattr_static(value, "__wrapped__", None)):
            self.visit(f"{expression}.__wrapped__", inner, name)
        elif _is_transparent(value):
            self._objects.setdefault(id(value), (expression, value, name))
            for method in ("__call__", "__getitem__", "__iter__"):
                self._attribute(expression, value, name, method)
        elif _is_known_by_identity(value):
            self._add(expression, value, name, is_weak=True)

    def _add(self, expression: str, value: Any, name: str, *, is_weak: bool) -> None:
        if expression != "fn":  # which is what programs are kept for
            self.places.setdefault(expression, Place(name, expression, value, is_weak=is_weak))

    def _visit_partial(self, expression: str, value: functools.partial, name: str) -> None:
        self.visit(f"{expression}.func", value.func, name)
        for i, x in enumerate(value.args):
            if not isinstance(x, _SCALARS):
                self.visit(f"{expression}.args[{i}]", x, name)
        for key, x in value.keywords.items():
            self.visit(f"{expression}.keywords[{key!r}]", x, key)

    def _visit_container(self, expression: str, value: Any, name: str) -> None:
        values = list(value.values() if isinstance(value, dict) else value)
        if len(values) > MAX_VALUES:
            return
        if all(isinstance(x, _SCALARS) for x in values):
            self._add(expression, copy.copy(value), name, is_weak=False)
        elif not isinstance(value, set | frozenset):
            self._add(f"len({expression})", len(value), f"len({name})", is_weak=False)
            for key, x in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(key, str | int):
                    self.visit(f"{expression}[{key!r}]", x, f"{name}[{key!r}]")

    def _visit_function(
        self, expression: str, fn: types.FunctionType, owner: tuple[str, Any, str] | None = None
    ) -> None:
        code = fn.__code__
        key = (code, owner and id(owner[1]), *map(id, fn.__closure__ or ()))
        if key in self._seen:
            return
        self._seen.add(key)
        if isinstance(wrapped := getattr(fn, "__wrapped__", None), _FUNCTIONS):
            self.visit(f"{expression}.__wrapped__", wrapped, _name_of(fn))
        cells = [
            (f"{expression}.__closure__[{i}].cell_contents", getattr(c, "cell_contents", _MISSING))
            for i, c in enumerate(fn.__closure__ or ())
        ]
        if _is_of_library(code):
            for where, value in cells:
                if callable(value) and not isinstance(value, type):
                    self.visit(where, value, _name_of(value))
            return
        environment: dict[str, tuple[str, Any, str]] = {
            name: (*cell, name) for name, cell in zip(code.co_freevars, cells, strict=True)
        }
        parameters = code.co_varnames[: code.co_argcount]
        defaults = fn.__defaults__ or ()
        for i, name in enumerate(parameters[len(parameters) - len(defaults) :]):
            environment[name] = f"{expression}.__defaults__[{i}]", defaults[i], name
        for name, value in (fn.__kwdefaults__ or {}).items():
            environment[name] = f"{expression}.__kwdefaults__[{name!r}]", value, name
        if owner is not None and parameters:
            environment[parameters[0]] = (*owner[:2], parameters[0])
        self._visit_code(expression, fn, code, environment)

    def _visit_code(
        self, expression: str, fn: types.FunctionType, code: types.CodeType, environment: dict
    ) -> None:
        found = reads_of(code)
        self._names |= found.names
        self._visit_super(found, environment)
        stored = [x.alias for x in found.reads if x.alias is not None]
        environment = dict(environment)
        for read in found.reads:
            if read.is_global:
                if read.name not in fn.__globals__:
                    continue
                origin = f"{expression}.__globals__[{read.name!r}]", fn.__globals__[read.name]
                origin = (*origin, read.name)
            else:
                origin = environment.get(read.name)
            reached = None if origin is None else self._follow(origin, read)
            if reached is None:
                continue
            # A local name for the value: later reads begin at that name.
            alias = read.alias if read.alias not in environment else None
            is_alias = alias is not None and stored.count(alias) == 1
            if alias is not None and is_alias:
                environment[alias] = reached
            if not is_alias or isinstance(reached[1], _SCALARS):
                self.visit(*reached)
        for inner in found.inner:
            known = {name: environment[name] for name in inner.co_freevars if name in environment}
            self._visit_code(expression, fn, inner, known)

    def _visit_super(self, found: CodeReads, environment: dict) -> None:
        for name in found.super_calls:
            owner = environment.get("self")
            for base in type(owner[1]).__mro__ if owner is not None else ():
                method = base.__dict__.get(name)
                if isinstance(method, types.FunctionType) and owner is not None:
                    at = f"type({owner[0]}).__mro__[{type(owner[1]).__mro__.index(base)}]"
                    self._visit_function(f"{at}.__dict__[{name!r}]", method, owner)

    def _follow(self, origin: tuple[str, Any, str], read: Read) -> tuple[str, Any, str] | None:
        """Returns the value at the end of a chain; None if the value has been visited already."""
        expression, value, name = origin
        if value is _MISSING:
            return None
        for kind, key in read.steps:
            if kind == "item":
                if not isinstance(value, dict | list | tuple) or not isinstance(key, str | int):
                    break  # the value as a whole
                try:
                    value = operator.getitem(value, key)  # type: ignore[call-overload]
                except (LookupError, TypeError):
                    return None
                expression, name = f"{expression}[{key!r}]", f"{name}[{key!r}]"
                continue
            if not _may_be_read(value):
                if key not in _OF_SHAPE:  # an array, or a tuple of functions as Optax has
                    self.visit(expression, value, name)
                return None
            if type(value) in _CONTAINERS:
                if key not in _MUTATORS:
                    self.visit(expression, value, name)
                return None
            reached = self._attribute(expression, value, name, key)
            if reached is None:
                return None
            expression, value, name = reached
        return expression, value, name

    def _attribute(
        self, expression: str, value: Any, name: str, attribute: str
    ) -> tuple[str, Any, str] | None:
        """An attribute that holds a value; what a property or a method reads is looked at."""
        static = inspect.getattr_static(type(value), attribute, None)
        owner, in_class = (expression, value, name), f"type({expression}).{attribute}"
        if isinstance(static, property | functools.cached_property):
            getter = static.fget if isinstance(static, property) else static.func
            if isinstance(getter, types.FunctionType):
                part = "fget" if isinstance(static, property) else "func"
                self._visit_function(f"{in_class}.{part}", getter, owner)
            return None
        held = getattr(value, "__dict__", {})
        if not isinstance(value, type | types.ModuleType) and attribute not in held:
            if isinstance(static, types.FunctionType):
                self._visit_function(in_class, static, owner)
                if _is_of_library(static.__code__) and _is_known_by_identity(value):
                    # It reads attributes that are not seen here: another object is another value.
                    self._add(expression, value, name, is_weak=True)
                return None
            if isinstance(static, staticmethod | classmethod):
                function = static.__func__
                if isinstance(function, types.FunctionType):
                    cls = (f"type({expression})", type(value), type(value).__name__)
                    bound = cls if isinstance(static, classmethod) else None
                    function_of = ".__func__" * isinstance(static, classmethod)
                    self._visit_function(f"{in_class}{function_of}", function, bound)
                return None
        try:
            found = getattr(value, attribute)
        except Exception:
            return None
        return f"{expression}.{attribute}", found, f"{name}.{attribute}"

    def _visit_attributes(self, expression: str, value: Any, name: str) -> None:
        for attribute in sorted(self._names):
            if not hasattr(type(value), attribute) and attribute not in vars(value):
                continue
            key = (id(value), attribute)
            if key in self._seen:
                continue
            self._seen.add(key)
            reached = self._attribute(expression, value, name, attribute)
            if reached is not None:
                self.visit(*reached)


def _name_of(fn: Any) -> str:
    """The name of a function, for messages."""
    return getattr(fn, "__name__", type(fn).__name__)


def _owner_name(method: types.MethodType) -> str:
    code = getattr(method.__func__, "__code__", None)
    return code.co_varnames[0] if code is not None and code.co_argcount else "self"


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
    is_known = isinstance(value, (*_SCALARS, *_CONTAINERS))
    try:
        return value_keys.key_of(value) if is_known else object()
    except TypeError:  # it holds a value that cannot be compared
        return object()


def _is_known_by_identity(value: Any) -> bool:
    """Whether another object in the place of `value` is another value, for all that is known."""
    excluded = (type, types.ModuleType, Iterator, *nnx_contents.OBJECT_TYPES)
    if isinstance(value, excluded) or type(value).__module__.partition(".")[0] == "tpudist":
        return False
    return type(value).__weakrefoffset__ != 0


def _may_be_read(value: Any) -> bool:
    """Whether what an attribute of a value holds is the program's own to change."""
    if isinstance(value, types.ModuleType):
        return not _is_library_module(value)
    if isinstance(value, (jax.Array, np.ndarray, *nnx_contents.OBJECT_TYPES)):
        return False
    cls = value if isinstance(value, type) else type(value)
    return cls.__module__.partition(".")[0] not in _OURS


def _is_transparent(value: Any) -> bool:
    """Whether the attributes of an object that code hands on are looked at."""
    if not hasattr(value, "__dict__") or isinstance(value, types.ModuleType):
        return False
    if isinstance(value, nnx_contents.OBJECT_TYPES):
        return False
    return _is_of_program(type(value)) or type(value).__name__ in ("SimpleNamespace", "Namespace")


@functools.cache
def _is_of_program(cls: type) -> bool:
    try:
        file = inspect.getfile(cls)
    except (TypeError, OSError):
        return cls.__module__ == "__main__"
    return not file.startswith(_LIBRARIES)


def _is_of_library(code: types.CodeType) -> bool:
    return code.co_filename.startswith(_LIBRARIES)


def _is_library_module(module: types.ModuleType) -> bool:
    file = object.__getattribute__(module, "__dict__").get("__file__")  # a lazy one is not loaded
    return file is None or file.startswith(_LIBRARIES)
