"""Shapes: which values are some, and whether what reads one takes a tuple of numbers."""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.program import Program

_TAKES_SHAPES = set(
    "reshape zeros ones fill broadcast_to normal uniform truncated_normal tile".split()
)


def is_taken_as_shape(program: Program, node: cst.CSTNode, depth: int = 0) -> bool:
    """Whether whatever reads a shape takes a tuple of numbers."""
    outer = program.parent(node)
    if isinstance(outer, cst.Subscript) and outer.value is node:
        [index, *more] = outer.slice
        if more:
            return False
        if isinstance(index.slice, cst.Index):
            return True
        return is_taken_as_shape(program, outer, depth)
    if isinstance(outer, cst.Arg):
        call = program.parent(outer)
        if not isinstance(call, cst.Call):
            return False
        name = program.callee(call)
        last = name.rpartition(".")[2]
        if isinstance(call.func, cst.Name) and call.func.value in ("print", "len", "tuple", "list"):
            return True
        takes_all = last == "reduce_prod" and len(call.args) == 1
        return name.startswith("tensorflow.") and (last in _TAKES_SHAPES or takes_all)
    if isinstance(outer, cst.AssignTarget | cst.Assign) and depth < 3:
        if not isinstance(outer, cst.Assign) or len(outer.targets) != 1:
            return False
        target = outer.targets[0].target
        if isinstance(target, cst.Tuple):
            return True
        reads = program.references(target) if isinstance(target, cst.Name) else []
        return bool(reads) and all(is_taken_as_shape(program, read, depth + 1) for read in reads)
    if isinstance(outer, cst.Element):  # a part of a shape
        values = program.parent(outer)
        arg = program.parent(values) if values is not None else None
        if not isinstance(arg, cst.Arg):
            return False
        is_concat = program.callee(program.parent(arg)) == "tensorflow.concat"
        return is_concat and are_parts_of_shape(program, arg.value)
    return isinstance(outer, cst.StarredElement | cst.FormattedStringExpression)


def are_parts_of_shape(program: Program, values: cst.BaseExpression) -> bool:
    """Whether values are shapes, parts of them, and lists."""
    if not isinstance(values, cst.List | cst.Tuple):
        return False
    shapes = lists = 0
    for element in values.elements:
        part = element.value
        if isinstance(part, cst.List):
            lists += 1
        elif program.callee(part.value if isinstance(part, cst.Subscript) else part) == (
            "tensorflow.shape"
        ):
            shapes += 1
    return shapes > 0 and shapes + lists == len(values.elements)


def is_shape(program: Program, value: cst.BaseExpression) -> bool:
    """Whether a value is a shape that becomes a tuple of numbers, or a part of one."""
    if isinstance(value, cst.Subscript):
        return is_shape(program, value.value)
    if isinstance(value, cst.Name):
        values = program.values(value)
        return bool(values) and all(
            isinstance(x, cst.Call | cst.Subscript) and is_shape(program, x) for x in values or ()
        )
    return program.callee(value) == "tensorflow.shape" and is_taken_as_shape(program, value)
