"""The values that a function of a program returns."""

from __future__ import annotations

import libcst as cst


class Returns(cst.CSTVisitor):
    """What a function returns, but not what the functions in it do."""

    def __init__(self) -> None:
        """Has found nothing yet; visit the body of the function."""
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
