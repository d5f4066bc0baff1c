"""Follows a value to its readers, to find one that needs a tensor rather than an array."""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.function_roles import Role, Roles
from tpudist.port.analysis.program import Program

# What tensors of TensorFlow have, and arrays of JAX do not.
_OF_TENSORS = {
    "consumers",
    "eval",
    "experimental_ref",
    "get_shape",
    "graph",
    "name",
    "op",
    "ref",
    "set_shape",
    "value_index",
}
# What takes texts, which are no arrays of JAX.
_TAKES_TEXT = ("tensorflow.strings.", "tensorflow.summary.text")
_DEPTH = 5


class ValueFlow:
    """Follows values of a program through names and arithmetic."""

    def __init__(self, program: Program, roles: Roles):
        """`roles` has the roles of all functions of `program`."""
        self._program = program
        self._roles = roles

    def ends_well(self, node: cst.CSTNode, depth: int = 0) -> bool:
        """Whether no reader of a value needs a tensor."""
        outer = self._program.parent(node)
        if depth > _DEPTH or outer is None:
            return True
        if self._roles.of(node) is Role.REPLICA:  # where it is an array
            return True
        if isinstance(outer, cst.BinaryOperation | cst.UnaryOperation):
            return self.ends_well(outer, depth + 1)
        if isinstance(outer, cst.Arg):
            return not self._program.callee(self._program.parent(outer)).startswith(_TAKES_TEXT)
        if isinstance(outer, cst.Attribute) and outer.value is node:
            if outer.attr.value == "device":  # an object here, and a text there
                return self._is_printed(outer)
            return outer.attr.value not in _OF_TENSORS
        if isinstance(outer, cst.Assign) and len(outer.targets) == 1:
            name = outer.targets[0].target
            return not isinstance(name, cst.Name) or all(
                self.ends_well(read, depth + 1) for read in self._program.references(name)
            )
        if isinstance(outer, cst.For) and outer.iter is node:
            name = outer.target
            return not isinstance(name, cst.Name) or all(
                self.ends_well(read, depth + 1) for read in self._program.references(name)
            )
        return True

    def _is_printed(self, node: cst.CSTNode) -> bool:
        """Whether a value is only turned into text."""
        outer = self._program.parent(node)
        if isinstance(outer, cst.FormattedStringExpression):
            return True
        call = self._program.parent(outer) if isinstance(outer, cst.Arg) else None
        return (
            isinstance(call, cst.Call)
            and isinstance(call.func, cst.Name)
            and call.func.value in ("print", "str", "repr")
        )
