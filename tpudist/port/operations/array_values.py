"""Values: methods that a tensor has and an array of JAX does not: `x.numpy()`, `x.get_shape()`.

What replaces them reads a tensor of a `tf.data` pipeline as well. Variables, also those of Keras,
have the methods and keep them.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.function_roles import Role, Roles
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer

# Attributes that are variables of Keras.
_VARIABLES = {"learning_rate", "iterations", "lr", "optimizer_step"}
_MAKERS = ("tensorflow.Variable", "tpudist.Variable")


class ArrayValues(Transformer):
    """`x.numpy()` is `np.asarray(x)[()]`: an array, and of a scalar the scalar."""

    def __init__(self, program: Program):
        """Finds where functions run."""
        super().__init__(program)
        self._roles = program.once(Roles)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """One call of a method without arguments."""
        func, updated = original_node.func, updated_node.func
        if original_node.args or not isinstance(func, cst.Attribute) or self.program.name(func):
            return updated_node
        assert isinstance(updated, cst.Attribute)
        owner = updated.value
        role = self._roles.of(original_node)
        parentheses = {"lpar": updated_node.lpar, "rpar": updated_node.rpar}
        if role in (Role.DATASET, None):
            return updated_node
        if func.attr.value == "numpy" and role is Role.HOST and not self._is_variable(func.value):
            array = cst.Call(self.write("np.asarray"), [cst.Arg(owner)])
            everything = cst.SubscriptElement(
                cst.Index(cst.Tuple([], lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))
            )
            return cst.Subscript(array, [everything], **parentheses)
        if func.attr.value == "get_shape":
            return cst.Attribute(owner, cst.Name("shape"), **parentheses)
        is_shape = isinstance(owner, cst.Attribute) and owner.attr.value == "shape"
        if func.attr.value == "as_list" and is_shape:
            return cst.Call(cst.Name("list"), [cst.Arg(owner)], **parentheses)
        return updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """The number of dims of a shape."""
        shape = updated_node.value
        if (
            updated_node.attr.value in ("rank", "ndims")
            and isinstance(shape, cst.Attribute)
            and shape.attr.value == "shape"
            and self._roles.of(original_node) not in (Role.DATASET, None)
        ):
            return updated_node.with_changes(value=shape.value, attr=cst.Name("ndim"))
        return updated_node

    def _is_variable(self, value: cst.BaseExpression) -> bool:
        """Whether a value is a variable for certain."""
        if isinstance(value, cst.Attribute):
            return value.attr.value in _VARIABLES
        values = self.program.values(value) if isinstance(value, cst.Name) else None
        return bool(values) and all(self.program.callee(x) in _MAKERS for x in values or ())
