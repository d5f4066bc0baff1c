"""What a checkpoint holds of a Variable: one value, whatever the mesh and its synchronization."""

from typing import Any

import jax

from tpudist.reduce_op import VariableAggregation
from tpudist.state import aggregation, variable_value
from tpudist.state.variable_base import VariableBase


class SavedInCheckpoints(VariableBase):
    """The part of `Variable` that checkpoints use."""

    def checkpoint_spec(self) -> tuple[tuple[int, ...], Any, jax.sharding.Sharding]:
        """Shape and dtype of the value, as checkpoints hold it, and where to restore it."""
        if self.on_read:
            return self.shape, self.dtype, self.strategy.replica_mesh.replicated
        return self.shape, self.dtype, self._value.sharding

    def checkpoint_value(self) -> jax.Array:
        """The value for a checkpoint: of an ON_READ variable, the aggregated one.

        Raises:
            ValueError: An ON_READ variable with aggregation NONE has no one value.
        """
        return aggregation.aggregate_components(self) if self.on_read else self._value

    def restore(self, value: jax.Array) -> None:
        """Takes a value that is placed as `checkpoint_spec` says, and which nobody else uses.

        Each component of an ON_READ variable becomes the value, or its share if they sum. As
        TensorFlow restores, but integers are shared out exactly.
        """
        if self.on_read:
            if self.aggregation is VariableAggregation.SUM:
                value = variable_value.shares(value, self.strategy.num_replicas_in_sync)
            value = self.strategy._place_variable(self, value)
        self._value = value
