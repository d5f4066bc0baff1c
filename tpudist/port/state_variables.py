"""Variables: `tf.Variable` becomes `tpudist.Variable` if all code that reads it accepts one.

This is safe for a variable with its own name that replica functions read, and that the rest of the
program uses only by its attributes, in operators and f-strings, in `print` and similar functions,
and in checkpoints. Variables that a layer, an operation of TensorFlow or a `tf.Module` uses stay.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.function_roles import Role
from tpudist.port.analysis.keras_objects import is_in_module
from tpudist.port.analysis.nodes import function_name
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.tensorflow_names import DTYPES

_VARIABLE = ("tensorflow.Variable", "tpudist.Variable")
_ATTRIBUTES = {"assign", "assign_add", "assign_sub", "numpy", "read_value", "value", "shape"}
_ATTRIBUTES |= {"dtype", "name", "scatter_add", "scatter_sub", "scatter_update"}
_READERS = {"print", "float", "int", "bool", "str", "repr"}


class StateVariables(Transformer):
    """Rewrites the variables whose readers are all known."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Rewrites the creation of a variable."""
        is_variable = self.program.callee(original_node) == "tensorflow.Variable"
        if is_variable and self._accepts_tpudist_variable(original_node):
            return updated_node.with_changes(func=self.write("tpudist.Variable"))
        return updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Rewrites the dtype of a variable."""
        name = self.program.name(original_node)
        if not name.startswith("tensorflow."):
            return updated_node
        name = name.removeprefix("tensorflow.").removeprefix("dtypes.")
        call = self.program.call_of_argument(original_node)
        if (
            name in DTYPES
            and call is not None
            and self.program.callee(call) == "tensorflow.Variable"
            and self._accepts_tpudist_variable(call)
        ):
            return self.write(f"jnp.{name}", updated_node)
        return updated_node

    def _accepts_tpudist_variable(self, call: cst.Call) -> bool:
        """Returns whether all code that uses a variable also works with a `tpudist.Variable`."""
        outer = self.program.parent(call)
        if self.roles.of(call) is not Role.HOST:
            return False
        if isinstance(outer, cst.Arg):
            return self._is_read_by(self.program.parent(outer))
        if not isinstance(outer, cst.Assign) or len(outer.targets) != 1:
            return False
        name = outer.targets[0].target
        if isinstance(name, cst.Attribute):
            if is_in_module(self.program, call):  # `trainable_variables` lists it
                return False
            return self._is_known_attribute(name.attr.value)
        # A name that may also be bound to something else would get methods of two libraries.
        if not self.program.has_only(name, lambda x: self.program.callee(x) in _VARIABLE):
            return False
        assert isinstance(name, cst.Name)
        return all(self._is_reader(read) for read in self.program.references(name))

    def _is_known_attribute(self, name: str) -> bool:
        """Returns whether an attribute has only variables as values, and all its uses are known."""
        values = self.program.attribute_values(name)
        # `tpudist.Variable` counts too: an earlier transformer, or an earlier port, may have
        # written it.
        if not all(self.program.callee(value) in _VARIABLE for value in values):
            return False
        return all(
            self._is_reader(node)
            for node in self.program.nodes(cst.Attribute)
            if node.attr.value == name
            and not isinstance(self.program.parent(node), cst.AssignTarget)
        )

    def _is_reader(self, read: cst.CSTNode) -> bool:
        role = self.roles.of(read)
        # On replicas, operations become functions of JAX, which accept a Variable. In a pipeline or
        # a Keras object, TensorFlow or Keras would read it.
        if role is not Role.HOST:
            return role is Role.REPLICA
        outer = self.program.parent(read)
        if isinstance(outer, cst.Attribute):
            return outer.attr.value in _ATTRIBUTES
        if isinstance(outer, cst.Arg):
            return self._is_read_by(self.program.parent(outer))
        # The result of an operator is an array of JAX. `array_values` replaces methods that only a
        # tensor has.
        return isinstance(
            outer,
            cst.FormattedStringExpression
            | cst.BinaryOperation
            | cst.UnaryOperation
            | cst.Comparison
            | cst.ComparisonTarget,
        )

    def _is_read_by(self, call: cst.CSTNode | None) -> bool:
        """Returns whether a call only reads a variable."""
        if not isinstance(call, cst.Call):
            return False
        if self.program.callee(call) == "tensorflow.train.Checkpoint":
            return True
        if isinstance(call.func, cst.Attribute):
            return call.func.attr.value == "format" and isinstance(call.func.value, cst.BaseString)
        return function_name(call) in _READERS
