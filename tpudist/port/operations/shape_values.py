"""Finds shapes, and whether the readers of a shape accept a tuple of numbers."""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.nodes import function_name
from tpudist.port.analysis.program import Program

_TAKES_SHAPES = set(
    "reshape zeros ones fill broadcast_to normal uniform truncated_normal tile".split()
)
_DEPTH = 3  # number of names that are followed, which also ends recursion


def is_taken_as_shape(program: Program, node: cst.CSTNode, depth: int = 0) -> bool:
    """Returns whether every reader of a shape accepts a tuple of numbers."""
    outer = program.parent(node)
    # `shape[0]` is a number for every reader; `shape[1:]` is a shape again.
    if isinstance(outer, cst.Subscript) and outer.value is node:
        [index, *more] = outer.slice
        if more:
            return False
        if isinstance(index.slice, cst.Index):
            return True
        return is_taken_as_shape(program, outer, depth)
    if (call := program.call_of_argument(node)) is not None:
        name = program.callee(call)
        last = name.rpartition(".")[2]
        if function_name(call) in ("print", "len", "tuple", "list"):
            return True
        # The product of all sizes is a number. With an axis it would be an array.
        is_number = last == "reduce_prod" and len(call.args) == 1
        return name.startswith("tensorflow.") and (last in _TAKES_SHAPES or is_number)
    if isinstance(outer, cst.Assign) and len(outer.targets) == 1 and depth < _DEPTH:
        target = outer.targets[0].target
        if isinstance(target, cst.Tuple):  # it is unpacked into numbers
            return True
        reads = program.references(target) if isinstance(target, cst.Name) else []
        return bool(reads) and all(is_taken_as_shape(program, read, depth + 1) for read in reads)
    if isinstance(outer, cst.Element):  # a part of a shape
        values = program.parent(outer)
        is_concat = program.callee(program.call_of_argument(values)) == "tensorflow.concat"
        return is_concat and are_parts_of_shape(program, values)
    return isinstance(outer, cst.StarredElement | cst.FormattedStringExpression)


def are_parts_of_shape(program: Program, values: cst.CSTNode | None) -> bool:
    """Returns whether a list has only shapes, slices of shapes and literal lists, and a shape."""
    if not isinstance(values, cst.List | cst.Tuple):
        return False
    parts = [x.value for x in values.elements if not isinstance(x.value, cst.List)]
    shapes = [x.value if isinstance(x, cst.Subscript) else x for x in parts]
    return bool(shapes) and all(program.callee(x) == "tensorflow.shape" for x in shapes)


def is_shape(program: Program, value: cst.BaseExpression) -> bool:
    """Returns whether a value is a shape that becomes a tuple of numbers, or a part of one."""
    if isinstance(value, cst.Subscript):
        return is_shape(program, value.value)
    if isinstance(value, cst.Name):
        return program.has_only(
            value, lambda x: isinstance(x, cst.Call | cst.Subscript) and is_shape(program, x)
        )
    return program.callee(value) == "tensorflow.shape" and is_taken_as_shape(program, value)
