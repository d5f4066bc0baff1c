"""The values that a function of a program returns."""

from __future__ import annotations

import libcst as cst


class Returns(cst.CSTVisitor):
    """Values that a function returns, without those of functions inside it."""

    def __init__(self) -> None:
        """Creates an empty list; visit the body of the function to fill it."""
        super().__init__()
        self.values: list[cst.BaseExpression | None] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        """A function in the function."""
        return False

    def visit_Lambda(self, node: cst.Lambda) -> bool:
        """The same."""
        return False

    def visit_Return(self, node: cst.Return) -> None:
        """One value; None of a bare `return`."""
        self.values.append(node.value)
