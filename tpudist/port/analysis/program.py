"""A program with resolved names, as its transformers see it.

Names are resolved by the imports and scopes of the program. `tf` may have any alias, and a variable
with the name `tf` is not TensorFlow. A name with two meanings counts as unknown.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import libcst as cst
from libcst import metadata
from libcst.metadata import QualifiedNameSource

# As TensorFlow 2 calls itself where both are meant.
_SAME_MODULE = (("tensorflow.compat.v2", "tensorflow"), ("tensorflow.v2", "tensorflow"))

# What transformers write, and import in the end; `tf` may come with all names of another module.
_WRITTEN = {
    "tf": "tensorflow",
    "jax": "jax",
    "jnp": "jax.numpy",
    "keras": "keras",
    "np": "numpy",
    "optax": "optax",
    "tpudist": "tpudist",
}


_T = TypeVar("_T")


class Program:
    """A module with facts about its nodes, which are nodes of `module`, not of the argument."""

    def __init__(self, module: cst.Module):
        """Resolves the names of a module."""
        self._wrapper = metadata.MetadataWrapper(module)
        self.module = self._wrapper.module
        self._names: dict[tuple[object, str], str] = {}
        self._memo: dict[object, Any] = {}

    def once(self, make: Callable[[Program], _T]) -> _T:
        """The result of a function of the program, which is made once."""
        if make not in self._memo:
            self._memo[make] = make(self)
        return self._memo[make]

    # Each takes a walk through the whole module, so it is made when it is asked for.

    @functools.cached_property
    def _parents(self) -> dict[cst.CSTNode, cst.CSTNode]:
        """Parent of each node, except for blanks, commas and parentheses."""
        parents: dict[cst.CSTNode, cst.CSTNode] = {}
        left: list[cst.CSTNode] = [self.module]
        while left:
            node = left.pop()
            for child in _children(node):
                parents[child] = node
                left.append(child)
        return parents

    def walk(self, visitor: cst.CSTVisitor) -> None:
        """Visits each node; skips the children of nodes for which the visitor returns False."""
        visits: dict[type[cst.CSTNode], Any] = {}
        left: list[cst.CSTNode] = [self.module]
        while left:
            node = left.pop()
            kind = type(node)
            if kind not in visits:
                name = f"visit_{kind.__name__}"
                is_own = getattr(type(visitor), name, None) is not getattr(
                    cst.CSTVisitor, name, None
                )
                visits[kind] = getattr(visitor, name) if is_own else None
            visit = visits[kind]
            if visit is None or visit(node) is not False:
                left.extend(reversed(_children(node)))

    @functools.cached_property
    def _positions(self) -> Mapping:
        return self._wrapper.resolve(metadata.PositionProvider)

    @functools.cached_property
    def _scopes(self) -> Mapping:
        return self._wrapper.resolve(metadata.ScopeProvider)

    def name(self, node: cst.CSTNode) -> str:
        """Returns the imported name, such as `tensorflow.keras.layers`; empty if there is none."""
        first = node
        while isinstance(first, cst.Attribute):
            first = first.value
        if not isinstance(first, cst.Name):  # what a call gives has no name
            return ""
        assert isinstance(node, cst.Name | cst.Attribute)
        scope = self.scope(first)
        key = (scope, _text_of_name(node))
        if (name := self._names.get(key)) is None:
            name = self._names[key] = self._resolve(node, first.value, scope)
        return name

    def _resolve(
        self, node: cst.Name | cst.Attribute, first: str, scope: metadata.Scope | None
    ) -> str:
        found = scope.get_qualified_names_for(node) if scope is not None else ()
        if not found and scope is not None and not scope[first]:
            # What an earlier transformer has written is imported when all of them are through.
            written, _, rest = _text_of_name(node).partition(".")
            return f"{_WRITTEN[written]}.{rest}".rstrip(".") if written in _WRITTEN else ""
        names = {one.name for one in found if one.source is QualifiedNameSource.IMPORT}
        if len(names) != 1 or len(names) != len(found):
            return ""
        [name] = names
        for alias, module in _SAME_MODULE:
            if name == alias or name.startswith(f"{alias}."):
                return module + name.removeprefix(alias)
        return name

    def callee(self, node: cst.CSTNode | None) -> str:
        """Returns the imported name that a node calls; empty for other nodes."""
        return self.name(node.func) if isinstance(node, cst.Call) else ""

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node around a node; None around the module."""
        return self._parents.get(node)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around a node, from the inside out."""
        outer = self.parent(node)
        while outer is not None:
            yield outer
            outer = self.parent(outer)

    def line(self, node: cst.CSTNode) -> int:
        """Returns the first line of a node, from 1."""
        return self._positions[node].start.line

    def scope(self, node: cst.CSTNode) -> metadata.Scope | None:
        """Returns the scope for the names of a node."""
        scope = self._scopes.get(node)
        return scope if isinstance(scope, metadata.Scope) else None

    def scopes(self) -> set[metadata.Scope]:
        """All scopes of the program."""
        return self._all_scopes

    @functools.cached_property
    def _all_scopes(self) -> set[metadata.Scope]:
        return {scope for scope in self._scopes.values() if isinstance(scope, metadata.Scope)}

    def imports(self, library: str) -> bool:
        """Whether a library, or something in it, is imported anywhere."""
        prefixes = (f"{library}.", f"tensorflow.{library}.")
        return any(
            f"{name.name}.".startswith(prefixes)
            for scope in self.scopes()
            for one in scope.assignments
            if isinstance(one, metadata.ImportAssignment)
            for name in one.get_qualified_names_for(one.name)
        )

    def is_bound(self, name: str) -> bool:
        """Whether a name has a meaning other than an import in any scope."""
        return any(
            isinstance(one, metadata.Assignment) and not isinstance(one, metadata.ImportAssignment)
            for scope in self.scopes()
            for one in scope.assignments[name]
        )

    def free_name(self, name: str, taken: Collection[str] = ()) -> str:
        """Returns an unused name: `name`, or `name_2` and so on."""
        number, free = 1, name
        while free in self._mentioned or free in taken:
            number += 1
            free = f"{name}_{number}"
        return free

    @functools.cached_property
    def _mentioned(self) -> set[str]:
        """All names, also imported ones, without attributes and keywords."""
        finder = _Mentioned(self)
        self.walk(finder)
        return finder.found

    def uses(self, prefix: str) -> bool:
        """Whether the program uses a full name with this prefix."""
        return any(name.startswith(prefix) for name in self._used)

    @functools.cached_property
    def _used(self) -> set[str]:
        finder = _Used(self)
        self.walk(finder)
        return finder.found

    def assignments(self, name: cst.Name) -> list[metadata.Assignment]:
        """Returns all assignments of a name; empty if it has another meaning too."""
        scope = self.scope(name)
        found = list(scope[name.value]) if scope is not None else []
        if any(not isinstance(one, metadata.Assignment) for one in found):
            return []
        return [one for one in found if isinstance(one, metadata.Assignment)]

    def values(self, name: cst.Name) -> list[cst.BaseExpression] | None:
        """Returns the values of `name = value`; None if the name is bound in another way."""
        values = []
        for assignment in self.assignments(name):
            target = self.parent(assignment.node)
            if isinstance(target, cst.AnnAssign) and target.target is assignment.node:
                values.append(target.value)
                continue
            if not isinstance(target, cst.AssignTarget):
                return None
            statement = self.parent(target)
            assert isinstance(statement, cst.Assign)
            values.append(statement.value)
        return values if values and None not in values else None

    def attribute_values(self, name: str) -> list[cst.BaseExpression]:
        """The expressions that are assigned to an attribute of this name, of whatever object."""
        return self._attribute_values.get(name, [])

    @functools.cached_property
    def _attribute_values(self) -> dict[str, list[cst.BaseExpression]]:
        finder = _AttributeValues()
        self.walk(finder)
        return finder.found

    def last_value(self, name: cst.Name) -> cst.BaseExpression | None:
        """Returns the value of a name at the place where it is read; None if uncertain.

        The value is `name = value` earlier in the same block, without a binding in between.
        """
        statement: cst.CSTNode = name
        for block in self.around(name):
            if isinstance(block, cst.Module | cst.IndentedBlock):
                break
            statement = block
        else:
            return None
        if isinstance(statement, cst.While):  # its test is read after its body, too
            return None
        binds = {
            outer: assignment.node
            for assignment in self.assignments(name)
            for outer in self.around(assignment.node)
            if self.parent(outer) is block
        }
        body = list(block.body)
        for before in reversed(body[: [id(x) for x in body].index(id(statement))]):
            if before in binds:
                return self._value_in(before, binds[before])
        return None

    def _value_in(self, statement: cst.CSTNode, target: cst.CSTNode) -> cst.BaseExpression | None:
        """The expression of `target = expression`, if that is a statement by itself."""
        outer = self.parent(target)
        assign = self.parent(outer) if isinstance(outer, cst.AssignTarget) else None
        if isinstance(assign, cst.Assign) and self.parent(assign) is statement:
            return assign.value
        return None

    def references(self, name: cst.Name) -> list[cst.CSTNode]:
        """Returns the nodes that read a name, in any scope that sees it."""
        return [
            access.node for assignment in self.assignments(name) for access in assignment.references
        ]

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | cst.Lambda | None:
        """Returns the function of a name or a lambda; None if uncertain."""
        if isinstance(node, cst.Lambda):
            return node
        if isinstance(node, cst.Name):
            found = [one.node for one in self.assignments(node)]
            if len(found) == 1 and isinstance(found[0], cst.FunctionDef):
                return found[0]
        return None


def _text_of_name(name: cst.Name | cst.Attribute) -> str:
    """A dotted name as text."""
    parts: list[str] = []
    node: cst.BaseExpression = name
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    assert isinstance(node, cst.Name)
    return ".".join([node.value, *reversed(parts)])


# Fields of nodes that hold no names.
_BLANKS = {"comma", "lpar", "rpar", "semicolon", "equal", "header", "footer", "indent", "dot"}
_BLANKS |= {"lbracket", "rbracket", "lbrace", "rbrace", "leading_lines", "trailing_whitespace"}
_BLANKS |= {"lines_after_decorators", "first_colon", "second_colon", "newline", "colon", "star"}


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple(x for x in names if x not in _BLANKS and not x.startswith("whitespace"))


def _children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The nodes in a node, in the order of the text."""
    found: list[cst.CSTNode] = []
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += [one for one in value if isinstance(one, cst.CSTNode)]
    return found


def name_expression(name: str) -> cst.Name | cst.Attribute:
    """An expression of a dotted name."""
    first, *rest = name.split(".")
    expression: cst.Name | cst.Attribute = cst.Name(first)
    for part in rest:
        expression = cst.Attribute(expression, cst.Name(part))
    return expression


def remove_statement(
    parent: cst.CSTNode | None, statement: cst.SimpleStatementLine
) -> cst.SimpleStatementLine | cst.RemovalSentinel:
    """Removes a statement and its comment; leaves `pass` in an empty block."""
    if isinstance(parent, cst.IndentedBlock) and len(parent.body) == 1:
        return statement.with_changes(body=[cst.Pass()])
    return cst.RemoveFromParent()


class _AttributeValues(cst.CSTVisitor):
    """Values that the program assigns to attributes, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[cst.BaseExpression]] = {}

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            if isinstance(target.target, cst.Attribute):
                self.found.setdefault(target.target.attr.value, []).append(node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if isinstance(node.target, cst.Attribute) and node.value is not None:
            self.found.setdefault(node.target.attr.value, []).append(node.value)


class _Used(cst.CSTVisitor):
    """Full names of imports that the program uses."""

    def __init__(self, program: Program):
        super().__init__()
        self._program = program
        self.found: set[str] = set()

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        name = self._program.name(node)
        self.found.add(name)
        return not name


class _Mentioned(cst.CSTVisitor):
    """Names that are not attributes or keywords."""

    def __init__(self, program: Program):
        super().__init__()
        self._program = program
        self.found: set[str] = set()

    def visit_Name(self, node: cst.Name) -> None:
        outer = self._program.parent(node)
        is_attribute = isinstance(outer, cst.Attribute) and outer.attr is node
        is_keyword = isinstance(outer, cst.Arg) and outer.keyword is node
        if not is_attribute and not is_keyword:
            self.found.add(node.value)
