"""Questions about single nodes of libcst, and small nodes that transformers write.

Nothing here knows the program around a node; see `analysis.program`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TypeVar

import libcst as cst

_N = TypeVar("_N", bound=cst.CSTNode)

# Calls of these stand for cell borders and IPython commands while a notebook is ported. No
# transformer changes them, because their names are unknown.
CELL_MARK, LINE_MARK = "__tpudist_cell__", "__tpudist_line__"

# Fields of nodes that contain no names.
_NAMELESS_FIELDS = set(
    "comma lpar rpar semicolon equal header footer indent dot lbracket rbracket lbrace rbrace "
    "leading_lines star colon trailing_whitespace lines_after_decorators first_colon second_colon "
    "newline".split()
)


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple(x for x in names if x not in _NAMELESS_FIELDS and not x.startswith("whitespace"))


def children_of(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Returns the children of a node, in the order of the text."""
    found: list[cst.CSTNode] = []
    for name in _fields(type(node)):
        value = getattr(node, name)  # a field of the dataclass
        if isinstance(value, cst.CSTNode):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += [child for child in value if isinstance(child, cst.CSTNode)]
    return found


def nodes_in(
    node: cst.CSTNode, node_class: type[_N], *, skip: tuple[type[cst.CSTNode], ...] = ()
) -> Iterator[_N]:
    """Yields a node and the nodes inside it that belong to a class, in the order of the text.

    Args:
        node: Node at which to begin.
        node_class: Class of the nodes.
        skip: Classes of inner nodes whose contents are left out.
    """
    # Children are pushed in reverse, so that they are popped in the order of the text.
    left = [node]
    while left:
        inner = left.pop()
        if isinstance(inner, node_class):
            yield inner
        if inner is node or not isinstance(inner, skip):
            left.extend(reversed(children_of(inner)))


def values_of_returns(function: cst.FunctionDef) -> list[cst.BaseExpression | None]:
    """Returns the values that a function returns, not counting functions inside it.

    A bare `return` has the value None.
    """
    skip = (cst.FunctionDef, cst.Lambda)
    return [node.value for node in nodes_in(function.body, cst.Return, skip=skip)]


def code_of(node: cst.CSTNode) -> str:
    """Returns the code of a node without blanks and line breaks."""
    return "".join(cst.Module([]).code_for_node(node).split())


def function_name(node: cst.CSTNode | None) -> str:
    """Returns `name` if a node is a call `name(...)`; empty for other nodes."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
        return node.func.value
    return ""


def method_name(node: cst.CSTNode | None) -> str:
    """Returns `name` if a node is a call `owner.name(...)`; empty for other nodes."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.attr.value
    return ""


def keyword_name(arg: cst.Arg) -> str:
    """Returns the keyword of an argument; empty if it has none."""
    return arg.keyword.value if arg.keyword else ""


def is_notebook_mark(node: cst.CSTNode, *names: str) -> bool:
    """Returns whether a statement is a call of one of some marks; without `names`, of any."""
    return code_of(node).startswith(tuple(f"{name}(" for name in names or (CELL_MARK, LINE_MARK)))


def has_text(value: cst.CSTNode | None, text: str) -> bool:
    """Returns whether a node is a plain string with this text."""
    return isinstance(value, cst.SimpleString) and value.evaluated_value == text


def name_expression(name: str) -> cst.Name | cst.Attribute:
    """Returns the expression of a dotted name."""
    first, *rest = name.split(".")
    expression: cst.Name | cst.Attribute = cst.Name(first)
    for part in rest:
        expression = cst.Attribute(expression, cst.Name(part))
    return expression


def keyword_arg(name: str, value: cst.BaseExpression) -> cst.Arg:
    """Returns the argument `name=value`, without blanks around the sign."""
    blank = cst.SimpleWhitespace("")
    return cst.Arg(value, keyword=cst.Name(name), equal=cst.AssignEqual(blank, blank))


def remove_statement(
    parent: cst.CSTNode | None, statement: cst.SimpleStatementLine
) -> cst.SimpleStatementLine | cst.RemovalSentinel:
    """Removes a statement and its comment; leaves `pass` in an empty block."""
    if isinstance(parent, cst.IndentedBlock) and len(parent.body) == 1:
        return statement.with_changes(body=[cst.Pass()])
    return cst.RemoveFromParent()
