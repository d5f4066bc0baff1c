"""Losses: the shares that replicas have of an average, and how Keras losses are told to reduce."""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.function_roles import Role, Roles
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer

_SHARES = {
    "tensorflow.nn.compute_average_loss": "tpudist.compute_average_loss",
    "tensorflow.nn.scale_regularization_loss": "tpudist.scale_regularization_loss",
}
_REDUCTION = "tensorflow.keras.losses.Reduction."
# AUTO was SUM_OVER_BATCH_SIZE outside of strategies, and refused in them.
_REDUCTIONS = {"NONE": "none", "SUM": "sum", "SUM_OVER_BATCH_SIZE": "sum_over_batch_size"}


class LossFunctions(Transformer):
    """Rewrites what losses are scaled and reduced by."""

    def __init__(self, program: Program):
        """Finds where functions run."""
        super().__init__(program)
        self._roles = program.once(Roles)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """The names that change."""
        name = self.program.name(original_node)
        if name in _SHARES and self._roles.of(original_node) in (Role.REPLICA, Role.BOTH):
            return self.write(_SHARES[name], updated_node)
        if name.startswith(_REDUCTION) and (rule := _REDUCTIONS.get(name.removeprefix(_REDUCTION))):
            return cst.SimpleString(f'"{rule}"')
        return updated_node
