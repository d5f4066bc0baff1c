"""The learning rate of an optimizer: Keras 2 calls it `lr`, Keras 3 `learning_rate`.

The port rewrites it if the object is certainly a Keras optimizer. Objects that only look like one
are found for the list of leftovers; `args.lr` is not.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.keras_objects import is_optimizer
from tpudist.port.analysis.nodes import keyword_name
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer


class LearningRates(Transformer):
    """Rewrites `optimizer.lr`, and the argument `lr`, to `learning_rate`."""

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Rewrites a rate that is read or assigned."""
        if original_node.attr.value == "lr" and self._is_certain(original_node):
            return updated_node.with_changes(attr=cst.Name("learning_rate"))
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Rewrites `Adam(lr=0.1)`."""
        if not is_optimizer(self.program, original_node):
            return updated_node
        args = [
            arg.with_changes(keyword=cst.Name("learning_rate"))
            if keyword_name(arg) == "lr"
            else arg
            for arg in updated_node.args
        ]
        return updated_node.with_changes(args=args)

    def _is_certain(self, node: cst.Attribute) -> bool:
        """Returns whether the object is a Keras optimizer, and the rate is not a schedule."""
        outer = self.program.parent(node)
        # A rate that is called is a schedule, whose attributes Keras does not define.
        is_called = isinstance(outer, cst.Call) and outer.func is node
        return not is_called and is_optimizer(self.program, node.value)


def is_old_rate(program: Program, node: cst.Attribute) -> bool:
    """Returns whether an attribute is the `lr` of an optimizer, by its value or its name.

    The program is ported already, so it imports Keras only by the name `keras`.
    """
    if node.attr.value != "lr" or program.name(node) or not program.imports("keras"):
        return False
    owner = node.value.attr if isinstance(node.value, cst.Attribute) else node.value
    has_name_of_optimizer = isinstance(owner, cst.Name) and "optimizer" in owner.value.lower()
    return has_name_of_optimizer or is_optimizer(program, node.value)
