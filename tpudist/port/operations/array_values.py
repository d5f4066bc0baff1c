"""Replaces methods that only tensors have, such as `x.numpy()` and `x.get_shape()`.

The replacements also accept tensors of a `tf.data` pipeline. Variables, also in Keras, have these
methods, so their calls stay.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.function_roles import Role
from tpudist.port.analysis.transformers import Transformer, with_parentheses_of

# Attributes whose values are Keras variables.
_VARIABLES = {"learning_rate", "iterations", "lr", "optimizer_step"}
_MAKERS = ("tensorflow.Variable", "tpudist.Variable")


class ArrayValues(Transformer):
    """Rewrites methods and attributes of tensors.

    `x.numpy()` becomes `np.asarray(x)[()]`: an array, or a NumPy scalar for an array without dims.
    """

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Rewrites a call of a method without arguments."""
        func, updated = original_node.func, updated_node.func
        if original_node.args or not isinstance(func, cst.Attribute) or self.program.name(func):
            return updated_node
        assert isinstance(updated, cst.Attribute)
        owner = updated.value
        role = self.roles.of(original_node)
        if role in (Role.DATASET, None):
            return updated_node
        if func.attr.value == "numpy" and role is Role.HOST and not self._is_variable(func.value):
            array = cst.Call(self.write("np.asarray"), [cst.Arg(owner)])
            empty_index = cst.SubscriptElement(
                cst.Index(cst.Tuple([], lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))
            )
            return with_parentheses_of(cst.Subscript(array, [empty_index]), updated_node)
        if func.attr.value == "get_shape":
            return with_parentheses_of(cst.Attribute(owner, cst.Name("shape")), updated_node)
        is_shape = isinstance(owner, cst.Attribute) and owner.attr.value == "shape"
        if func.attr.value == "as_list" and is_shape:
            return with_parentheses_of(cst.Call(cst.Name("list"), [cst.Arg(owner)]), updated_node)
        return updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Rewrites the number of dims of a shape."""
        shape = updated_node.value
        if (
            updated_node.attr.value in ("rank", "ndims")
            and isinstance(shape, cst.Attribute)
            and shape.attr.value == "shape"
            and self.roles.of(original_node) not in (Role.DATASET, None)
        ):
            return updated_node.with_changes(value=shape.value, attr=cst.Name("ndim"))
        return updated_node

    def _is_variable(self, value: cst.BaseExpression) -> bool:
        """Returns whether a value is certainly a variable."""
        if isinstance(value, cst.Attribute):
            return value.attr.value in _VARIABLES
        return self.program.has_only(value, lambda x: self.program.callee(x) in _MAKERS)
