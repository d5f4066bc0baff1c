"""A program with resolved names, as its transformers see it.

Names are resolved by the imports and scopes of the program. `tf` may have any alias, and a variable
with the name `tf` is not TensorFlow. A name with two meanings counts as unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import libcst as cst
from libcst import metadata
from libcst.helpers import get_full_name_for_node_or_raise
from libcst.metadata import QualifiedNameSource

from tpudist.port.analysis.nodes import children_of, nodes_in

# Other names that TensorFlow 2 has for itself.
_SAME_MODULE = (("tensorflow.compat.v2", "tensorflow"), ("tensorflow.v2", "tensorflow"))

# The names that transformers write before the program imports them, and their modules. `tf` may
# come from `import *` of another module.
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
_Node = TypeVar("_Node", bound=cst.CSTNode)


class Program:
    """A module with facts about its nodes.

    Args:
        module: The module. It is copied: all nodes here are nodes of the attribute `module`.
    """

    def __init__(self, module: cst.Module):
        self._wrapper = metadata.MetadataWrapper(module)
        self.module = self._wrapper.module
        self._names: dict[tuple[object, str], str] = {}
        self._memo: dict[object, Any] = {}
        self._by_class: dict[type[cst.CSTNode], list[cst.CSTNode]] = {}

    def once(self, make: Callable[[Program], _T]) -> _T:
        """Returns the result of a function of the program, which is called once."""
        # The key is the function itself, so `make` must be a function of a module or a class. A
        # lambda would be a new key at each call.
        if make not in self._memo:
            self._memo[make] = make(self)
        return self._memo[make]

    # The properties below are cached, because each needs a walk through the whole module.

    @functools.cached_property
    def _parents(self) -> dict[cst.CSTNode, cst.CSTNode]:
        """Parent of each node, except for blanks, commas and parentheses."""
        return {
            child: node
            for node in nodes_in(self.module, cst.CSTNode)
            for child in children_of(node)
        }

    def nodes(self, node_class: type[_Node]) -> list[_Node]:
        """Returns all nodes of a class, in the order of the text."""
        if node_class not in self._by_class:
            self._by_class[node_class] = list(nodes_in(self.module, node_class))
        return self._by_class[node_class]  # pyright: ignore[reportReturnType]

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
        if not isinstance(first, cst.Name):  # the result of a call has no name
            return ""
        assert isinstance(node, cst.Name | cst.Attribute)
        scope = self.scope(first)
        # A name has one meaning in a scope, so the cache needs neither the node nor its place.
        key = (scope, get_full_name_for_node_or_raise(node))
        if (name := self._names.get(key)) is None:
            name = self._names[key] = self._resolve(node, first.value, scope)
        return name

    def _resolve(
        self, node: cst.Name | cst.Attribute, first: str, scope: metadata.Scope | None
    ) -> str:
        found = scope.get_qualified_names_for(node) if scope is not None else ()
        if not found and scope is not None and not scope[first]:
            # An earlier transformer may have written this name. It is imported only at the end.
            written, _, rest = get_full_name_for_node_or_raise(node).partition(".")
            return f"{_WRITTEN[written]}.{rest}".rstrip(".") if written in _WRITTEN else ""
        names = {binding.name for binding in found if binding.source is QualifiedNameSource.IMPORT}
        # Two imports, as in `try: import tensorflow ... except: ...`, or an import and an
        # assignment.
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
        """Returns the node around a node; None for the module."""
        return self._parents.get(node)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yields the nodes around a node, from the inside out."""
        outer = self.parent(node)
        while outer is not None:
            yield outer
            outer = self.parent(outer)

    def call_of_argument(self, node: cst.CSTNode | None) -> cst.Call | None:
        """Returns the call with a node as an argument; None for other nodes."""
        arg = self.parent(node) if node is not None else None
        call = self.parent(arg) if isinstance(arg, cst.Arg) else None
        return call if isinstance(call, cst.Call) else None

    def line(self, node: cst.CSTNode) -> int:
        """Returns the first line of a node, from 1."""
        return self._positions[node].start.line

    def scope(self, node: cst.CSTNode) -> metadata.Scope | None:
        """Returns the scope for the names of a node."""
        scope = self._scopes.get(node)
        return scope if isinstance(scope, metadata.Scope) else None

    def scopes(self) -> set[metadata.Scope]:
        """Returns all scopes of the program."""
        return self.once(_scopes_of)

    def imports(self, library: str) -> bool:
        """Returns whether a library, or something in it, is imported anywhere."""
        prefixes = (f"{library}.", f"tensorflow.{library}.")
        return any(
            f"{name.name}.".startswith(prefixes)
            for scope in self.scopes()
            for binding in scope.assignments
            if isinstance(binding, metadata.ImportAssignment)
            for name in binding.get_qualified_names_for(binding.name)
        )

    def is_bound(self, name: str) -> bool:
        """Returns whether any scope binds a name otherwise than by an import."""
        return any(
            isinstance(binding, metadata.Assignment)
            and not isinstance(binding, metadata.ImportAssignment)
            for scope in self.scopes()
            for binding in scope.assignments[name]
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
        return {node.value for node in self.nodes(cst.Name) if not self._is_label(node)}

    def _is_label(self, node: cst.Name) -> bool:
        outer = self.parent(node)
        return (isinstance(outer, cst.Attribute) and outer.attr is node) or (
            isinstance(outer, cst.Arg) and outer.keyword is node
        )

    def uses(self, prefix: str) -> bool:
        """Returns whether the program uses a dotted name with this prefix, as an attribute."""
        return any(name.startswith(prefix) for name in self._used)

    @functools.cached_property
    def _used(self) -> set[str]:
        return {self.name(node) for node in self.nodes(cst.Attribute)}

    def assignments(self, name: cst.Name) -> list[metadata.Assignment]:
        """Returns all bindings of a name, imports included; empty if it may also be a builtin."""
        scope = self.scope(name)
        found = list(scope[name.value]) if scope is not None else []
        if any(not isinstance(binding, metadata.Assignment) for binding in found):
            return []
        return [binding for binding in found if isinstance(binding, metadata.Assignment)]

    def values(self, node: cst.CSTNode) -> list[cst.BaseExpression]:
        """Returns the values of a name, as in `name = value`.

        Empty if the node is not a name, or if the name is bound in another way, too.
        """
        values = []
        for assignment in self.assignments(node) if isinstance(node, cst.Name) else ():
            target = self.parent(assignment.node)
            if isinstance(target, cst.AnnAssign) and target.target is assignment.node:
                values.append(target.value)
                continue
            if not isinstance(target, cst.AssignTarget):
                return []
            statement = self.parent(target)
            assert isinstance(statement, cst.Assign)
            values.append(statement.value)
        return [] if None in values else values  # `x: int` declares a name without a value

    def has_only(
        self, node: cst.CSTNode, is_expected: Callable[[cst.BaseExpression], bool]
    ) -> bool:
        """Returns whether a node is a name, and certainly all its values are as expected."""
        values = self.values(node)
        return bool(values) and all(map(is_expected, values))

    def attribute_values(self, name: str) -> list[cst.BaseExpression]:
        """Returns the expressions that are assigned to an attribute of this name, of any object."""
        return self._attribute_values.get(name, [])

    @functools.cached_property
    def _attribute_values(self) -> dict[str, list[cst.BaseExpression]]:
        pairs = [(x.target, node.value) for node in self.nodes(cst.Assign) for x in node.targets]
        pairs += [(node.target, node.value) for node in self.nodes(cst.AnnAssign) if node.value]
        found: dict[str, list[cst.BaseExpression]] = {}
        for target, value in pairs:
            if isinstance(target, cst.Attribute):
                found.setdefault(target.attr.value, []).append(value)
        return found

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
            found = [binding.node for binding in self.assignments(node)]
            if len(found) == 1 and isinstance(found[0], cst.FunctionDef):
                return found[0]
        return None


def _scopes_of(program: Program) -> set[metadata.Scope]:
    scopes = program._scopes.values()
    return {scope for scope in scopes if isinstance(scope, metadata.Scope)}
