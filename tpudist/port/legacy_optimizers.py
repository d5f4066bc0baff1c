"""Optimizers of old Keras that the new one has with the same rule: `legacy.SGD`.

The others differ in where they add epsilon, so they are left.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.transformers import Transformer

_LEGACY = "tensorflow.keras.optimizers.legacy.SGD"
_SAME = {"learning_rate", "momentum", "nesterov", "name"}


class LegacyOptimizers(Transformer):
    """Rewrites calls whose arguments mean the same."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """One optimizer."""
        if self.program.callee(original_node) != _LEGACY or len(original_node.args) > 4:
            return updated_node
        given = [arg.keyword.value for arg in original_node.args if arg.keyword]
        if any(arg.star for arg in original_node.args) or not set(given) <= _SAME:
            return updated_node
        if len(original_node.args) - len(given) > 3:  # the fourth is another one
            return updated_node
        return updated_node.with_changes(func=self.write("keras.optimizers.SGD"))
