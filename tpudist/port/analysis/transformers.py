"""Changes of a program: each transformer makes one kind of them, and several share one walk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from tpudist.port.analysis.program import Program, name_expression


class Transformer(cst.CSTTransformer):
    """One kind of change; `imports` are the modules that what it writes needs."""

    def __init__(self, program: Program):
        """Transforms the module of `program`."""
        super().__init__()
        self.program = program
        self.imports: set[str] = set()
        self.changes = False  # whether anything was changed

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Records whether a node changed."""
        result = super().on_leave(original_node, updated_node)
        self.changes = self.changes or result is not updated_node
        return result

    def write(self, name: str, like: cst.CSTNode | None = None) -> cst.Name | cst.Attribute:
        """An expression of a name of `jnp`, `np`, `jax`, `keras` or `tpudist`, imported so.

        With the parentheses of the expression that it replaces.
        """
        self.imports.add(name.partition(".")[0])
        parentheses = {}
        if isinstance(like, cst.Name | cst.Attribute):
            parentheses = {"lpar": like.lpar, "rpar": like.rpar}
        return name_expression(name).with_changes(**parentheses)


class Together(cst.CSTTransformer):
    """Several transformers of the same module, in one walk."""

    def __init__(self, transformers: Sequence[Transformer]):
        """Asks each transformer in turn; what one removes, the others do not see."""
        super().__init__()
        self._transformers = transformers
        self._changing: dict[type[cst.CSTNode], list[Transformer]] = {}  # by class of nodes

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Applies each transformer to a node."""
        kind = type(original_node)
        if kind not in self._changing:
            name = f"leave_{kind.__name__}"
            inherited = getattr(cst.CSTTransformer, name, None)
            self._changing[kind] = [
                one for one in self._transformers if getattr(type(one), name, None) is not inherited
            ]
        for transformer in self._changing[kind]:
            result = transformer.on_leave(original_node, updated_node)
            if type(result) is not type(updated_node):
                return result
            updated_node = result
        return updated_node
