"""Finds the Python values that a function captures, by the names that its code reads.

The names are followed in the function's code, and in the code of the functions that it calls. Not
followed: values that libraries capture, and values that code computes before it takes an attribute
of them. Arrays and objects of libraries are known by identity, so a change inside them is not seen.
"""

import copy
import functools
import inspect
import operator
import os
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpudist.state import nnx_contents
from tpudist.state.captured_values import CONTAINERS, SCALARS, Place
from tpudist.state.code_reads import CodeReads, Read, reads_of
from tpudist.xla import compile_log, program_packages

MAX_VALUES = 1000
"""Values of one function, or of one container, that are looked at; more are left out."""

_MAX_DEPTH = 100
"""Levels of containers in containers that are looked at."""
# Methods of containers that read none of their contents.
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
        if isinstance(value, SCALARS):
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
        elif isinstance(value, CONTAINERS):
            self._visit_container(expression, value, name)
        elif isinstance(value, type):
            if _is_of_program(value):
                init = inspect.getattr_static(value, "__init__", None)
                if isinstance(init, types.FunctionType):
                    self._visit_function(f"{expression}.__init__", init)
        elif callable(inner := inspect.getattr_static(value, "__wrapped__", None)):
            self.visit(f"{expression}.__wrapped__", inner, name)
            for part, x in getattr(value, "__dict__", {}).items():
                if part != "__wrapped__" and isinstance(x, _FUNCTIONS):  # rules of `custom_vjp`
                    self.visit(f"{expression}.{part}", x, f"{name}.{part}")
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
            if not isinstance(x, SCALARS):
                self.visit(f"{expression}.args[{i}]", x, name)
        for key, x in value.keywords.items():
            self.visit(f"{expression}.keywords[{key!r}]", x, key)

    def _visit_container(self, expression: str, value: Any, name: str) -> None:
        values = list(value.values() if isinstance(value, dict) else value)
        if len(values) > MAX_VALUES or expression.count("[") > _MAX_DEPTH:
            return
        if all(isinstance(x, SCALARS) for x in values):
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
            self.visit(f"{expression}.__wrapped__", wrapped, compile_log.name_of(fn))
        cells = [
            (f"{expression}.__closure__[{i}].cell_contents", getattr(c, "cell_contents", _MISSING))
            for i, c in enumerate(fn.__closure__ or ())
        ]
        if _is_of_library(code):
            for where, value in cells:
                if callable(value) and not isinstance(value, type):
                    self.visit(where, value, compile_log.name_of(value))
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
            if not is_alias or isinstance(reached[1], SCALARS):
                self.visit(*reached)
        for inner in found.inner:
            known = {name: environment[name] for name in inner.co_freevars if name in environment}
            self._visit_code(expression, fn, inner, known)

    def _visit_super(self, found: CodeReads, environment: dict) -> None:
        for of, attribute in found.super_reads:
            owner = environment.get(of)
            if owner is None or owner[1] is _MISSING:
                continue
            cls, where = _class_of(*owner[:2])
            for i, base in enumerate(cls.__mro__):
                static = base.__dict__.get(attribute, _MISSING)
                at = f"{where}.__mro__[{i}].__dict__[{attribute!r}]"
                if static is _MISSING or self._visit_method(at, static, owner, ".__func__"):
                    continue
                self.visit(at, static, f"{base.__name__}.{attribute}")

    def _visit_method(
        self, expression: str, static: Any, owner: tuple[str, Any, str], of_static: str
    ) -> bool:
        """Looks at the code of a property or a method, and returns whether it is one.

        Args:
            expression: Gives it from its class.
            static: The property or method.
            owner: The object that it is called on.
            of_static: What gives the function if it is a static method.
        """
        bound: tuple[str, Any, str] | None = owner
        if isinstance(static, property):
            function, part = static.fget, ".fget"
        elif isinstance(static, functools.cached_property):
            function, part = static.func, ".func"
        elif isinstance(static, classmethod):
            function, part = static.__func__, ".__func__"
            cls, where = _class_of(*owner[:2])
            bound = where, cls, cls.__name__
        elif isinstance(static, staticmethod):
            function, part, bound = static.__func__, of_static, None
        else:
            function, part = static, ""
        if isinstance(function, types.FunctionType):
            self._visit_function(f"{expression}{part}", function, bound)
        return function is not static or isinstance(function, types.FunctionType)

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
            if type(value) in CONTAINERS:
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
        held = getattr(value, "__dict__", {})
        is_own = isinstance(value, type | types.ModuleType) or attribute in held
        is_property = isinstance(static, property | functools.cached_property)
        if (is_property or not is_own) and self._visit_method(in_class, static, owner, ""):
            if isinstance(static, types.FunctionType):
                if _is_of_library(static.__code__) and _is_known_by_identity(value):
                    # It reads attributes that are not seen here: another object is another value.
                    self._add(expression, value, name, is_weak=True)
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


def _class_of(expression: str, value: Any) -> tuple[type, str]:
    """The class of an object, or a class itself, with the expression that gives it."""
    return (value, expression) if isinstance(value, type) else (type(value), f"type({expression})")


def _owner_name(method: types.MethodType) -> str:
    code = getattr(method.__func__, "__code__", None)
    return code.co_varnames[0] if code is not None and code.co_argcount else "self"


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
    return not _is_in_library(file)


def _is_of_library(code: types.CodeType) -> bool:
    return _is_in_library(code.co_filename)


def _is_library_module(module: types.ModuleType) -> bool:
    file = object.__getattribute__(module, "__dict__").get("__file__")  # a lazy one is not loaded
    return file is None or _is_in_library(file)


def _is_in_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and not program_packages.has_file(file)
