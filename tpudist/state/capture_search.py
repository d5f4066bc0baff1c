"""Finds the Python values that a function captures, by the names that its code reads.

The search follows names in the function's code, and in the code of the functions that it calls. It
follows neither values that libraries capture nor attributes of values that the code computes.
Arrays and objects of libraries are known by identity, so a change inside them is not seen.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from tpudist.state import library_code
from tpudist.state.captured_values import CONTAINERS, SCALARS, Place
from tpudist.state.code_reads import CodeReads, Read, reads_of
from tpudist.xla import descriptions

# Bound on the visits of one search plus the places that it has found, and on the values of one
# container. All places are compared at each call, so this bounds the cost of a call. Further values
# are silently left out: a change of them does not compile again.
_MAX_VALUES = 1000
# Levels of nested containers that are visited. A container may contain itself.
_MAX_DEPTH = 100
# Methods of containers that read none of their contents: a function that only appends to a list
# does not depend on it.
_MUTATORS = frozenset(
    "add append appendleft clear discard extend insert pop popitem popleft remove update".split()
)
_SHAPE_ATTRIBUTES = frozenset(("dtype", "itemsize", "nbytes", "ndim", "shape", "size"))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_MISSING = object()


def find(fn: Callable[..., object]) -> dict[str, Place]:
    """Returns the places of the values that `fn` captures, by their expressions."""
    search = _Search()
    search.visit(_Node("fn", fn, ""))
    search.visit_objects()
    return search.places


class _Node(NamedTuple):
    """A value that the code can reach.

    Attributes:
        expression: Python text that gives the value, of the function `fn`.
        value: The value; `_MISSING` for an empty cell of a closure.
        name: Name of the value in the code, for messages.
    """

    expression: str
    value: object
    name: str

    def part(self, suffix: str, value: object, name: str | None = None) -> "_Node":
        """Returns the node of a part, whose expression is this one with `suffix`."""
        return _Node(self.expression + suffix, value, self.name if name is None else name)


class _Search:
    """Follows the code of a function and knows the node of each name in it.

    The search ends although objects may refer to each other: it visits each pair of an expression
    and a value, each function with the same captures, and each attribute of an object only once
    (`_seen`), and stops at `_MAX_VALUES`.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self._seen: set[object] = set()
        # Attribute names in all code that was visited.
        self._attribute_names: set[str] = set()
        # Objects that the code uses as a whole, by id. It may pass them to code that reads any of
        # these names. So these attributes are visited last, when all names are known.
        self._whole_objects: dict[int, _Node] = {}

    def visit_objects(self) -> None:
        """Visits attributes of the objects that the code uses as a whole.

        A method that is found there can contain new names and new objects. So this repeats until
        a pass finds neither; both sets only grow, up to the names and objects of the program.
        """
        size = -1
        while size != (size := len(self._attribute_names) + len(self._whole_objects)):
            for node in list(self._whole_objects.values()):
                self._visit_attributes(node)

    def visit(self, node: _Node) -> None:
        """Visits a value that code uses as a whole."""
        value = node.value
        if len(self._seen) + len(self.places) > _MAX_VALUES:
            return
        if isinstance(value, SCALARS):
            self._add(node, is_weak=False)
            return
        if (node.expression, id(value)) in self._seen:
            return
        self._seen.add((node.expression, id(value)))
        if isinstance(value, _FUNCTIONS):
            self._visit_callable(node, value)
        elif isinstance(value, jax.Array | np.ndarray):
            self._add(node, is_weak=True)
        elif isinstance(value, types.MappingProxyType):
            self._visit_container(node._replace(expression=f"dict({node.expression})"), dict(value))
        elif isinstance(value, CONTAINERS):
            self._visit_container(node, value)
        elif isinstance(value, type):
            if library_code.is_program_class(value):
                init = inspect.getattr_static(value, "__init__", None)
                if isinstance(init, types.FunctionType):
                    self._visit_function(node.part(".__init__", init), init)
        elif callable(inner := library_code.inner_function_of(value)):
            # A transformation of JAX, such as `jax.jit(fn)`. `custom_vjp` has its rules as further
            # attributes.
            self.visit(node.part(".__wrapped__", inner))
            for part, x in _attributes_of(value).items():
                if part != "__wrapped__" and isinstance(x, _FUNCTIONS):
                    self.visit(node.part(f".{part}", x, f"{node.name}.{part}"))
        elif library_code.is_transparent(value):
            self._whole_objects.setdefault(id(value), node)
            for method in ("__call__", "__getitem__", "__iter__"):
                self._attribute(node, method)
        elif library_code.is_known_by_identity(value):
            self._add(node, is_weak=True)

    def _add(self, node: _Node, *, is_weak: bool) -> None:
        if node.expression != "fn":  # programs are stored per function already
            place = Place(node.name, node.expression, node.value, is_weak=is_weak)
            self.places.setdefault(node.expression, place)

    def _visit_callable(
        self, node: _Node, value: types.FunctionType | types.MethodType | functools.partial
    ) -> None:
        self._add(node, is_weak=True)
        if isinstance(value, types.FunctionType):
            self._visit_function(node, value)
        elif isinstance(value, functools.partial):
            self.visit(node.part(".func", value.func))
            for i, x in enumerate(value.args):
                # A scalar in this tuple cannot change: another one belongs to another partial.
                if not isinstance(x, SCALARS):
                    self.visit(node.part(f".args[{i}]", x))
            for key, x in value.keywords.items():
                self.visit(node.part(f".keywords[{key!r}]", x, key))
        else:
            function = node.part(".__func__", value.__func__)
            if not isinstance(function.value, types.FunctionType):  # a method under `jax.jit`
                function = function.part(
                    ".__wrapped__", library_code.inner_function_of(function.value)
                )
            if isinstance(function.value, types.FunctionType):
                code = function.value.__code__
                name = code.co_varnames[0] if code.co_argcount else "self"
                owner = node.part(".__self__", value.__self__, name)
                self._visit_function(function, function.value, owner)

    def _visit_container(self, node: _Node, value: object) -> None:
        assert isinstance(value, CONTAINERS)
        values = list(value.values() if isinstance(value, dict) else value)
        # Each level adds a bracket to the expression. It has few others, for closures and globals.
        if len(values) > _MAX_VALUES or node.expression.count("[") > _MAX_DEPTH:
            return
        if all(isinstance(x, SCALARS) for x in values):
            self._add(node._replace(value=copy.copy(value)), is_weak=False)
        elif not isinstance(value, set | frozenset):
            length = _Node(f"len({node.expression})", len(value), f"len({node.name})")
            self._add(length, is_weak=False)
            for key, x in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(key, str | int):
                    self.visit(node.part(f"[{key!r}]", x, f"{node.name}[{key!r}]"))

    def _visit_function(
        self, node: _Node, fn: types.FunctionType, owner: _Node | None = None
    ) -> None:
        """Visits what the code of `fn` reads.

        Args:
            node: Node whose expression gives `fn`.
            fn: The function.
            owner: For a method, the object that is its first argument.
        """
        code = fn.__code__
        # Functions that a factory returned share their code, but not what they capture.
        captures = (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
        closure = fn.__closure__ or ()
        key = (code, None if owner is None else id(owner.value), *map(id, (*closure, *captures)))
        if key in self._seen:
            return
        self._seen.add(key)
        wrapped = _attributes_of(fn).get("__wrapped__")
        if isinstance(wrapped, _FUNCTIONS):
            self.visit(node.part(".__wrapped__", wrapped, descriptions.name_of(fn)))
        cells = [
            node.part(f".__closure__[{i}].cell_contents", _contents_of(cell), name)
            for i, (cell, name) in enumerate(
                zip(fn.__closure__ or (), code.co_freevars, strict=True)
            )
        ]
        if library_code.is_library_code(code):
            # A decorator or transformation: only functions in its closure may be yours.
            for cell in cells:
                if callable(cell.value) and not isinstance(cell.value, type):
                    self.visit(cell._replace(name=descriptions.name_of(cell.value)))
            return
        environment = {cell.name: cell for cell in cells}
        parameters = code.co_varnames[: code.co_argcount]
        defaults = fn.__defaults__ or ()
        for i, name in enumerate(parameters[len(parameters) - len(defaults) :]):
            environment[name] = node.part(f".__defaults__[{i}]", defaults[i], name)
        for name, value in (fn.__kwdefaults__ or {}).items():
            environment[name] = node.part(f".__kwdefaults__[{name!r}]", value, name)
        if owner is not None and parameters:
            environment[parameters[0]] = owner._replace(name=parameters[0])
        self._visit_code(node, fn, code, environment)

    def _visit_code(
        self,
        node: _Node,
        fn: types.FunctionType,
        code: types.CodeType,
        environment: Mapping[str, _Node],
    ) -> None:
        code_reads = reads_of(code)
        self._attribute_names |= code_reads.names
        self._visit_super(code_reads, environment)
        aliases = [x.alias for x in code_reads.reads if x.alias is not None]
        environment = dict(environment)
        for read in code_reads.reads:
            if not read.is_global:
                origin = environment.get(read.name)
            elif read.name in fn.__globals__:
                value = fn.__globals__[read.name]
                origin = node.part(f".__globals__[{read.name!r}]", value, read.name)
            else:
                origin = None
            reached = None if origin is None else self._follow(origin, read)
            if reached is None:
                continue
            # `config = self.config` makes `config` a local name of the value, and later reads begin
            # there: the code may use only `config.lr`, so the whole value is not visited. A name
            # that is assigned twice, or that is a parameter, is not followed.
            alias = read.alias
            if alias is not None and alias not in environment and aliases.count(alias) == 1:
                environment[alias] = reached
                if not isinstance(reached.value, SCALARS):
                    continue
            self.visit(reached)
        for inner in code_reads.inner:
            names = [name for name in inner.co_freevars if name in environment]
            self._visit_code(node, fn, inner, {name: environment[name] for name in names})

    def _visit_super(self, code_reads: CodeReads, environment: Mapping[str, _Node]) -> None:
        for name, attribute in code_reads.super_reads:
            owner = environment.get(name)
            if owner is None or owner.value is _MISSING:
                continue
            # Which class `super()` means is not known here, so the attribute is looked up in all.
            cls = _class_of(owner)
            for i, base in enumerate(_as_class(owner.value).__mro__):
                static = base.__dict__.get(attribute, _MISSING)
                if static is _MISSING:
                    continue
                suffix = f".__mro__[{i}].__dict__[{attribute!r}]"
                reached = cls.part(suffix, static, f"{base.__name__}.{attribute}")
                if not self._visit_method(reached, owner, ".__func__"):
                    self.visit(reached)

    def _visit_method(self, node: _Node, owner: _Node, static_suffix: str) -> bool:
        """Visits the code of a property or a method, and returns whether the node is one.

        Args:
            node: The property or method, as its class stores it.
            owner: The object on which it is called.
            static_suffix: Suffix that makes the expression of a static method that of its function:
                `.__func__` if it is read from a `__dict__`, nothing if it is read from a class.
        """
        static, bound = node.value, owner
        if isinstance(static, property):
            function, suffix = static.fget, ".fget"
        elif isinstance(static, functools.cached_property):
            function, suffix = static.func, ".func"
        elif isinstance(static, classmethod):
            function, suffix, bound = static.__func__, ".__func__", _class_of(owner)
        elif isinstance(static, staticmethod):
            function, suffix, bound = static.__func__, static_suffix, None
        else:
            function, suffix = static, ""
        if isinstance(function, types.FunctionType):
            self._visit_function(node.part(suffix, function), function, bound)
        return function is not static or isinstance(function, types.FunctionType)

    def _follow(self, origin: _Node, read: Read) -> _Node | None:
        """Returns the node at the end of a chain; None if it is missing or was visited already."""
        node = origin
        if node.value is _MISSING:
            return None
        for kind, key in read.steps:
            value = node.value
            if kind == "item":
                if not isinstance(value, dict | list | tuple) or not isinstance(key, str | int):
                    break  # the value as a whole
                item = _item_of(value, key)
                if item is _MISSING:
                    return None
                node = node.part(f"[{key!r}]", item, f"{node.name}[{key!r}]")
                continue
            if not library_code.has_program_attributes(value):
                # A library's object (an array, an optax.GradientTransformation) counts as a whole.
                if key not in _SHAPE_ATTRIBUTES:
                    self.visit(node)
                return None
            if type(value) in CONTAINERS:  # exactly: a subclass may have attributes of its own
                if key not in _MUTATORS:
                    self.visit(node)
                return None
            reached = self._attribute(node, str(key))
            if reached is None:
                return None
            node = reached
        return node

    def _attribute(self, node: _Node, attribute: str) -> _Node | None:
        """Returns the node of an attribute; None for a method or property, whose code is visited.

        The attribute of a class does not count if the object has its own with the same name.
        """
        value = node.value
        static = inspect.getattr_static(type(value), attribute, None)
        is_own = isinstance(value, type | types.ModuleType) or attribute in _attributes_of(value)
        is_property = isinstance(static, property | functools.cached_property)
        method = _Node(f"type({node.expression}).{attribute}", static, node.name)
        # Python prefers a property to the object's own value, but the stored value of a
        # cached_property to the property. Both count as properties here: otherwise the places would
        # differ before and after the first read of a cached one.
        if (is_property or not is_own) and self._visit_method(method, node, ""):
            if isinstance(static, types.FunctionType):
                if library_code.is_library_code(
                    static.__code__
                ) and library_code.is_known_by_identity(value):
                    # A library's method reads attributes that are not visited. So any other object
                    # counts as another value.
                    self._add(node, is_weak=True)
            return None
        try:
            part = getattr(value, attribute)  # may run a descriptor or `__getattr__` of your class
        except Exception:  # which may raise anything
            return None
        return node.part(f".{attribute}", part, f"{node.name}.{attribute}")

    def _visit_attributes(self, node: _Node) -> None:
        cls, own = type(node.value), _attributes_of(node.value)
        for attribute in sorted(self._attribute_names):
            # Of the class, so that no property and no `__getattr__` of yours runs.
            if not hasattr(cls, attribute) and attribute not in own:
                continue
            key = (id(node.value), attribute)
            if key in self._seen:
                continue
            self._seen.add(key)
            reached = self._attribute(node, attribute)
            if reached is not None:
                self.visit(reached)


def _attributes_of(value: object) -> Mapping[str, object]:
    return getattr(value, "__dict__", {})  # an object with slots has none


def _contents_of(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return _MISSING


def _item_of(value: dict | list | tuple, key: str | int) -> object:
    try:
        return value[key]  # type: ignore[index]
    except (LookupError, TypeError):
        return _MISSING


def _as_class(value: object) -> type:
    return value if isinstance(value, type) else type(value)


def _class_of(node: _Node) -> _Node:
    """Returns the node of an object's class; of a class, the node itself."""
    if isinstance(node.value, type):
        return node._replace(name=node.value.__name__)
    return _Node(f"type({node.expression})", type(node.value), type(node.value).__name__)
