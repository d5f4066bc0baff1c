"""The optimizer of old Keras that has the same rule in Keras 3: `legacy.SGD`.

The other ones stay, because they add epsilon in a different place.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.transformers import Transformer

_LEGACY = "tensorflow.keras.optimizers.legacy.SGD"
# Other keywords may have another meaning in Keras 3, and `decay` does not exist there.
_SAME = {"learning_rate", "momentum", "nesterov", "name"}
_NUM_SAME_POSITIONS = 3  # learning_rate, momentum and nesterov; the fourth differs


class LegacyOptimizers(Transformer):
    """Rewrites calls whose arguments have the same meaning."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Rewrites one optimizer."""
        if self.program.callee(original_node) != _LEGACY:
            return updated_node
        keywords = [arg.keyword.value for arg in original_node.args if arg.keyword]
        if any(arg.star for arg in original_node.args) or not set(keywords) <= _SAME:
            return updated_node
        if len(original_node.args) - len(keywords) > _NUM_SAME_POSITIONS:
            return updated_node
        return updated_node.with_changes(func=self.write("keras.optimizers.SGD"))
