"""Variables: `tf.Variable` becomes `tpudist.Variable` if all code that reads it accepts one.

This is safe for a variable with its own name that replica functions read, and that the program
assigns and reads by its methods or prints. Variables that a layer, an operation of TensorFlow or a
`tf.Module` uses stay.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.function_roles import Role, Roles
from tpudist.port.analysis.keras_objects import is_in_module
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.operations.array_operations import DTYPES

_VARIABLE = ("tensorflow.Variable", "tpudist.Variable")
_METHODS = {"assign", "assign_add", "assign_sub", "numpy", "read_value", "value", "shape", "dtype"}
_METHODS |= {"name", "scatter_add", "scatter_sub", "scatter_update"}
_READERS = {"print", "float", "int", "bool", "str", "repr"}


class StateVariables(Transformer):
    """Rewrites the variables whose readers are all known."""

    def __init__(self, program: Program):
        """Finds where functions run."""
        super().__init__(program)
        self._roles = program.once(Roles)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """One variable that is made."""
        if self.program.callee(original_node) == "tensorflow.Variable" and self._is_known(
            original_node
        ):
            return updated_node.with_changes(func=self.write("tpudist.Variable"))
        return updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """The dtype of one."""
        name = self.program.name(original_node).removeprefix("tensorflow.").removeprefix("dtypes.")
        arg = self.program.parent(original_node)
        call = self.program.parent(arg) if isinstance(arg, cst.Arg) else None
        if (
            name in DTYPES
            and self.program.name(original_node).startswith("tensorflow.")
            and isinstance(call, cst.Call)
            and self.program.callee(call) == "tensorflow.Variable"
            and self._is_known(call)
        ):
            return self.write(f"jnp.{name}", updated_node)
        return updated_node

    def _is_known(self, call: cst.Call) -> bool:
        """Whether all that becomes of a variable is known."""
        outer = self.program.parent(call)
        if self._roles.of(call) is not Role.HOST:
            return False
        if isinstance(outer, cst.Arg):
            return self._is_read_by(self.program.parent(outer))
        if not isinstance(outer, cst.Assign) or len(outer.targets) != 1:
            return False
        name = outer.targets[0].target
        if isinstance(name, cst.Attribute):
            if is_in_module(self.program, call):  # it is in `trainable_variables`
                return False
            return self._is_known_attribute(name.attr.value)
        values = self.program.values(name) if isinstance(name, cst.Name) else None
        if not values or not all(self.program.callee(one) in _VARIABLE for one in values):
            return False
        assert isinstance(name, cst.Name)
        return all(self._is_reader(read) for read in self.program.references(name))

    def _is_known_attribute(self, name: str) -> bool:
        """Whether all that is assigned to an attribute is a variable, and all its readers known."""
        values = self.program.attribute_values(name)
        if not all(self.program.callee(one) in _VARIABLE for one in values):
            return False
        finder = _Attributes(name)
        self.program.walk(finder)
        return all(
            self._is_reader(node)
            for node in finder.found
            if not isinstance(self.program.parent(node), cst.AssignTarget)
        )

    def _is_reader(self, read: cst.CSTNode) -> bool:
        role = self._roles.of(read)
        if role is not Role.HOST:
            return role is Role.REPLICA
        outer = self.program.parent(read)
        if isinstance(outer, cst.Attribute):
            return outer.attr.value in _METHODS
        if isinstance(outer, cst.Arg):
            return self._is_read_by(self.program.parent(outer))
        return isinstance(
            outer,
            cst.FormattedStringExpression
            | cst.BinaryOperation
            | cst.UnaryOperation
            | cst.Comparison
            | cst.ComparisonTarget,
        )

    def _is_read_by(self, call: cst.CSTNode | None) -> bool:
        """Whether a call only looks at a variable."""
        if not isinstance(call, cst.Call):
            return False
        if self.program.callee(call) == "tensorflow.train.Checkpoint":
            return True
        if isinstance(call.func, cst.Attribute):
            return call.func.attr.value == "format" and isinstance(call.func.value, cst.BaseString)
        return isinstance(call.func, cst.Name) and call.func.value in _READERS


class _Attributes(cst.CSTVisitor):
    """The attributes of a name, of whatever objects."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name
        self.found: list[cst.Attribute] = []

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if node.attr.value == self._name:
            self.found.append(node)
