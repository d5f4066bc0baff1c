"""The base class of the transformers, and a walk that several of them share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import libcst as cst

from tpudist.port.analysis.function_roles import Roles
from tpudist.port.analysis.nodes import name_expression
from tpudist.port.analysis.program import Program


class Transformer(cst.CSTTransformer):
    """One kind of change of a program.

    Attributes:
        program: The program before the change.
        imports: Modules that the changed code needs.
        has_changed: Whether anything was changed.
    """

    def __init__(self, program: Program):
        super().__init__()
        self.program = program
        self.imports: set[str] = set()
        self.has_changed = False

    @functools.cached_property
    def roles(self) -> Roles:
        """The roles of the functions of the program."""
        return self.program.once(Roles)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Records whether a node changed."""
        # libcst returns the same object if no method of this class changed the node.
        result = super().on_leave(original_node, updated_node)
        self.has_changed = self.has_changed or result is not updated_node
        return result

    def write(self, name: str, like: cst.CSTNode | None = None) -> cst.Name | cst.Attribute:
        """Returns the expression of a dotted name, and adds its module to `imports`.

        Args:
            name: Name that begins with a key of `import_statements.STATEMENTS`.
            like: Expression that it replaces, for its parentheses.
        """
        self.imports.add(name.partition(".")[0])
        return with_parentheses_of(name_expression(name), like)


def with_parentheses_of(new: Any, old: cst.CSTNode | None) -> Any:
    """Returns an expression with the parentheses of the expression that it replaces."""
    if not isinstance(old, cst.BaseExpression):
        return new
    return new.with_changes(lpar=old.lpar, rpar=old.rpar)


class Together(cst.CSTTransformer):
    """Several transformers of the same module, in one walk.

    Each node goes through the transformers in turn. If one replaces it by a node of another class,
    or removes it, the others do not see it. Methods `visit_*` of transformers are not called.
    """

    def __init__(self, transformers: Sequence[Transformer]):
        super().__init__()
        self._transformers = transformers
        # The transformers that have a method for a class of nodes. Most nodes have none, so this
        # saves most of the calls of a walk.
        self._changing: dict[type[cst.CSTNode], list[Transformer]] = {}

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Applies each transformer to a node."""
        node_class = type(original_node)
        if node_class not in self._changing:
            # libcst finds methods by their names, and its base class has all of them.
            name = f"leave_{node_class.__name__}"
            inherited = getattr(cst.CSTTransformer, name, None)
            self._changing[node_class] = [
                one for one in self._transformers if getattr(type(one), name, None) is not inherited
            ]
        for transformer in self._changing[node_class]:
            result = transformer.on_leave(original_node, updated_node)
            if type(result) is not type(updated_node):
                return result
            updated_node = result
        return updated_node
