"""Strategies, contexts and all else of `tf.distribute`: the names change.

TPUs need no initialisation here, so statements that only do that go.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.program import Transformer, remove_statement
from tpudist.port.tensorflow_names import TPUDIST

_INITIALISES = (
    "tensorflow.config.experimental_connect_to_cluster",
    "tensorflow.config.experimental_connect_to_host",
    "tensorflow.tpu.experimental.initialize_tpu_system",
    "tensorflow.tpu.experimental.shutdown_tpu_system",
)


class StrategyNames(Transformer):
    """`tf.distribute.X` is `tpudist.X`."""

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Names by the table."""
        name = TPUDIST.get(self.program.name(original_node))
        if name and not self._is_server_here(original_node):
            return self.write(name, updated_node)
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Drops what only initialises."""
        [first, *more] = original_node.body
        if more or not isinstance(first, cst.Expr):
            return updated_node
        if self.program.callee(first.value) in _INITIALISES:
            return remove_statement(self.program.parent(original_node), updated_node)
        return updated_node

    def _is_server_here(self, node: cst.Attribute) -> bool:
        """Whether a server is started and not kept: one of several in this process."""
        call = self.program.parent(node)
        return (
            self.program.name(node) == "tensorflow.distribute.Server"
            and isinstance(call, cst.Call)
            and isinstance(self.program.parent(call), cst.Expr)
        )
