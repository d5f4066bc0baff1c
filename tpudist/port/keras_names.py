"""Keras: `tf.keras` is Keras 3, which is `keras`; here it computes with JAX.

The backend is chosen before Keras is imported, so the program says it in its first lines.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.keras_objects import is_called_as_model, is_model, makes_model
from tpudist.port.analysis.program import Program, remove_statement
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.tensorflow_names import KERAS_ALIASES, is_in_keras

_KERAS = "tensorflow.keras"
_VARIABLES = {"trainable_variables", "trainable_weights", "variables", "weights"}
BACKEND = 'os.environ["KERAS_BACKEND"] = "jax"'


class KerasNames(Transformer):
    """`tf.keras.X` is `keras.X`, metrics are reset by their new name, and the backend is JAX."""

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """The part of a name that changes, if `keras` has the whole of it."""
        name = self.program.name(original_node)
        if name == _KERAS and self._is_there(original_node, _KERAS):
            return self.write("keras", updated_node)
        if name in KERAS_ALIASES and self._is_class(original_node):
            return self.write(KERAS_ALIASES[name], updated_node)
        if updated_node.attr.value == "reset_states" and self._is_metric(original_node.value):
            return updated_node.with_changes(attr=cst.Name("reset_state"))
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """`keras = tf.keras` is an import here."""
        [first, *more] = original_node.body
        if more or not isinstance(first, cst.Assign) or len(first.targets) != 1:
            return updated_node
        name = first.targets[0].target
        if (
            isinstance(name, cst.Name)
            and name.value == "keras"
            and self.program.name(first.value) == _KERAS
            and len(self.program.assignments(name)) == 1
        ):
            self.imports.add("keras")
            return remove_statement(self.program.parent(original_node), updated_node)
        return updated_node

    def leave_Comparison(
        self, original_node: cst.Comparison, updated_node: cst.Comparison
    ) -> cst.Comparison:
        """`"bn" in v.name`: the names of layers are in the path of a variable here."""
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
            path = name.with_changes(attr=cst.Name("path"))
            comparison = updated_node.comparisons[0].with_changes(comparator=path)
            return updated_node.with_changes(comparisons=[comparison])
        return updated_node

    def _is_variable(self, name: cst.Name) -> bool:
        """Whether a name stands for one variable after the other of a model of Keras."""
        loops = [self.program.parent(one.node) for one in self.program.assignments(name)]
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
        """Another backend that the program itself asks for."""
        return (
            updated_node.with_changes(value=cst.SimpleString('"jax"'))
            if (is_backend(original_node) and not _is_text(original_node.value, "jax"))
            else updated_node
        )

    def _is_there(self, node: cst.CSTNode, module: str) -> bool:
        """Whether `keras` has the longest name that a node is part of."""
        name = self.program.name(_whole(self.program, node))
        inner = name.removeprefix(module).removeprefix(".")
        return not inner or is_in_keras(inner)

    def _is_class(self, node: cst.CSTNode) -> bool:
        """Whether a class is named: its module has functions by other names, too."""
        outer = self.program.parent(node)
        return isinstance(outer, cst.Attribute) and outer.attr.value[:1].isupper()

    def _is_metric(self, value: cst.BaseExpression) -> bool:
        """Whether a name is bound to metrics only."""
        values = self.program.values(value) if isinstance(value, cst.Name) else None
        return bool(values) and all(
            self.program.callee(one).startswith(
                ("tensorflow.keras.metrics.", "keras.metrics.", "tensorflow.metrics.")
            )
            for one in values or ()
        )


def is_backend(statement: cst.CSTNode) -> bool:
    """Whether a statement is `os.environ["KERAS_BACKEND"] = ...`."""
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0].target
    if not isinstance(target, cst.Subscript) or len(target.slice) != 1:
        return False
    index = target.slice[0].slice
    return isinstance(index, cst.Index) and _is_text(index.value, "KERAS_BACKEND")


def _is_text(value: cst.BaseExpression, text: str) -> bool:
    return isinstance(value, cst.SimpleString) and value.evaluated_value == text


def _whole(program: Program, node: cst.CSTNode) -> cst.CSTNode:
    """The longest name that a node is the beginning of."""
    outer = program.parent(node)
    while isinstance(outer, cst.Attribute) and outer.value is node:
        node, outer = outer, program.parent(outer)
    return node
