"""Renames `tf.keras` to `keras`, which is Keras 3, and selects its JAX backend.

The backend must be selected before Keras is imported, so the first lines of the program do that.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.keras_objects import is_called_as_model, is_model, makes_model
from tpudist.port.analysis.nodes import has_text, remove_statement
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.tensorflow_names import KERAS_ALIASES, is_in_keras

_KERAS = "tensorflow.keras"
_VARIABLES = {"trainable_variables", "trainable_weights", "variables", "weights"}
BACKEND = 'os.environ["KERAS_BACKEND"] = "jax"'


class KerasNames(Transformer):
    """Rewrites `tf.keras.X`, the method that resets metrics, and the choice of a backend."""

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Rewrites the first part of a name, if `keras` has the whole name."""
        name = self.program.name(original_node)
        if name == _KERAS and self._keras_has(original_node):
            return self.write("keras", updated_node)
        # Only for classes: a function of `tf.losses` may have another name in `keras.losses`.
        if name in KERAS_ALIASES and self._is_class(original_node):
            return self.write(KERAS_ALIASES[name], updated_node)
        if updated_node.attr.value == "reset_states" and self._is_metric(original_node.value):
            return updated_node.with_changes(attr=cst.Name("reset_state"))
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Removes `keras = tf.keras`, which becomes an import."""
        [first, *more] = original_node.body
        if more or not isinstance(first, cst.Assign) or len(first.targets) != 1:
            return updated_node
        name = first.targets[0].target
        if (
            isinstance(name, cst.Name)
            and name.value == "keras"
            and self.program.name(first.value) == _KERAS
            # With a second meaning, the import would not replace all of them.
            and len(self.program.assignments(name)) == 1
        ):
            self.imports.add("keras")
            return remove_statement(self.program.parent(original_node), updated_node)
        return updated_node

    def leave_Comparison(
        self, original_node: cst.Comparison, updated_node: cst.Comparison
    ) -> cst.Comparison:
        """Rewrites `"bn" in v.name`: in Keras 3, the path of a variable has the layer's name."""
        [first, *more] = original_node.comparisons
        name = first.comparator
        if (
            not more
            and isinstance(first.operator, cst.In | cst.NotIn)
            and isinstance(name, cst.Attribute)
            and name.attr.value == "name"
            and isinstance(name.value, cst.Name)
            and self._is_variable(name.value)
        ):
            # Keras 2 named a variable "bn/gamma:0"; in Keras 3, `name` is "gamma" and `path` is
            # "bn/gamma".
            path = name.with_changes(attr=cst.Name("path"))
            comparison = updated_node.comparisons[0].with_changes(comparator=path)
            return updated_node.with_changes(comparisons=[comparison])
        return updated_node

    def _is_variable(self, name: cst.Name) -> bool:
        """Returns whether a name is the target of loops over the variables of Keras models."""
        loops = [self.program.parent(binding.node) for binding in self.program.assignments(name)]
        return bool(loops) and all(
            isinstance(loop, cst.For | cst.CompFor)
            and isinstance(loop.target, cst.Name)
            and isinstance(loop.iter, cst.Attribute)
            and loop.iter.attr.value in _VARIABLES
            and (
                self.program.once(makes_model)
                or is_model(self.program, loop.iter.value)
                or is_called_as_model(self.program, loop.iter.value)
            )
            for loop in loops
        )

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        """Rewrites the backend that the program selects itself."""
        if is_backend(original_node) and not has_text(original_node.value, "jax"):
            return updated_node.with_changes(value=cst.SimpleString('"jax"'))
        return updated_node

    def _keras_has(self, node: cst.CSTNode) -> bool:
        """Returns whether `keras` has the longest name that begins with `tf.keras` at a node."""
        name = self.program.name(_longest_name(self.program, node))
        inner = name.removeprefix(_KERAS).removeprefix(".")
        return not inner or is_in_keras(inner)

    def _is_class(self, node: cst.CSTNode) -> bool:
        """Returns whether a node is followed by the name of a class."""
        outer = self.program.parent(node)
        return isinstance(outer, cst.Attribute) and outer.attr.value[:1].isupper()

    def _is_metric(self, value: cst.BaseExpression) -> bool:
        """Returns whether a name is bound to metrics only."""
        modules = ("tensorflow.keras.metrics.", "keras.metrics.", "tensorflow.metrics.")
        return self.program.has_only(value, lambda x: self.program.callee(x).startswith(modules))


def is_backend(statement: cst.CSTNode) -> bool:
    """Returns whether a statement is `os.environ["KERAS_BACKEND"] = ...`."""
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0].target
    if not isinstance(target, cst.Subscript) or len(target.slice) != 1:
        return False
    index = target.slice[0].slice
    return isinstance(index, cst.Index) and has_text(index.value, "KERAS_BACKEND")


def _longest_name(program: Program, node: cst.CSTNode) -> cst.CSTNode:
    """Returns the longest name that begins with a node."""
    outer = program.parent(node)
    while isinstance(outer, cst.Attribute) and outer.value is node:
        node, outer = outer, program.parent(outer)
    return node
