"""Losses: how replicas share an average, and the reductions of Keras losses."""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.function_roles import Role
from tpudist.port.analysis.transformers import Transformer

_SHARES = {
    "tensorflow.nn.compute_average_loss": "tpudist.compute_average_loss",
    "tensorflow.nn.scale_regularization_loss": "tpudist.scale_regularization_loss",
}
_REDUCTION = "tensorflow.keras.losses.Reduction."
# Not AUTO: it was SUM_OVER_BATCH_SIZE outside of strategies, and an error in them.
_REDUCTIONS = {"NONE": "none", "SUM": "sum", "SUM_OVER_BATCH_SIZE": "sum_over_batch_size"}


class LossFunctions(Transformer):
    """Rewrites the scaling and the reductions of losses."""

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Rewrites a name."""
        name = self.program.name(original_node)
        if name in _SHARES and self.roles.of(original_node) in (Role.REPLICA, Role.BOTH):
            return self.write(_SHARES[name], updated_node)
        if name.startswith(_REDUCTION) and (rule := _REDUCTIONS.get(name.removeprefix(_REDUCTION))):
            return cst.SimpleString(f'"{rule}"')
        return updated_node
