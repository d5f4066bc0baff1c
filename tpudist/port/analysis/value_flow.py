"""Follows a value to its readers, to find readers that need a tensor instead of an array."""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.function_roles import Role, Roles
from tpudist.port.analysis.nodes import function_name
from tpudist.port.analysis.program import Program

# Attributes that tensors have and JAX arrays do not.
_OF_TENSORS = set(
    "consumers eval experimental_ref get_shape graph name op ref set_shape value_index".split()
)
# Functions that accept strings, which JAX arrays cannot contain.
_TAKES_TEXT = ("tensorflow.strings.", "tensorflow.summary.text")
_DEPTH = 5  # number of readers that are followed, which also ends recursion


class ValueFlow:
    """Follows values of a program through names and arithmetic.

    Args:
        program: The program.
        roles: Roles of its functions.
    """

    def __init__(self, program: Program, roles: Roles):
        self._program = program
        self._roles = roles

    def needs_tensor(self, node: cst.CSTNode, depth: int = 0) -> bool:
        """Returns whether a reader of a value needs a tensor."""
        outer = self._program.parent(node)
        # Optimistic, unlike other limits of depth: a reader so far away rarely needs a tensor, and
        # JAX would then raise an error that names the attribute.
        if depth > _DEPTH or outer is None:
            return False
        if self._roles.of(node) is Role.REPLICA:  # all values there are arrays
            return False
        if isinstance(outer, cst.BinaryOperation | cst.UnaryOperation):
            return self.needs_tensor(outer, depth + 1)
        # The function that is called is not followed: only functions of text are known to need one.
        if isinstance(outer, cst.Arg):
            return self._program.callee(self._program.parent(outer)).startswith(_TAKES_TEXT)
        if isinstance(outer, cst.Attribute) and outer.value is node:
            if outer.attr.value == "device":  # JAX has an object here, TensorFlow a string
                return not self._is_printed(outer)
            return outer.attr.value in _OF_TENSORS
        # Other targets than one name are not followed, as at the end of the depth.
        name: cst.CSTNode | None = None
        if isinstance(outer, cst.Assign) and len(outer.targets) == 1:
            name = outer.targets[0].target
        elif isinstance(outer, cst.For) and outer.iter is node:
            name = outer.target
        reads = self._program.references(name) if isinstance(name, cst.Name) else []
        return any(self.needs_tensor(read, depth + 1) for read in reads)

    def _is_printed(self, node: cst.CSTNode) -> bool:
        """Returns whether a value is only turned into text."""
        outer = self._program.parent(node)
        call = self._program.call_of_argument(node)
        is_formatted = isinstance(outer, cst.FormattedStringExpression)
        return is_formatted or function_name(call) in ("print", "str", "repr")
