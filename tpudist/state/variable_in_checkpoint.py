"""Saves and restores a Variable: a checkpoint has one value, whatever the mesh.

So a checkpoint can be restored with another number of replicas, or another synchronization.
"""

import jax
import numpy as np

from tpudist.array_types import Shape
from tpudist.reduce_op import VariableAggregation
from tpudist.state import aggregation, variable_value
from tpudist.state.variable_base import VariableBase


class SavedInCheckpoints(VariableBase):
    """The part of `Variable` that checkpoints use."""

    def checkpoint_spec(self) -> tuple[Shape, np.dtype, jax.sharding.Sharding]:
        """Returns the shape and dtype of the saved value, and the sharding to restore it with."""
        if self.on_read:
            return self.shape, self.dtype, self.strategy.replica_mesh.replicated
        return self.shape, self.dtype, self._value.sharding

    def checkpoint_value(self) -> jax.Array:
        """Returns the value to save; for an ON_READ variable, the aggregate of its components.

        Raises:
            ValueError: If it is an ON_READ variable with aggregation NONE.
        """
        return aggregation.aggregate_components(self) if self.on_read else self._value

    def restore(self, value: jax.Array) -> None:
        """Sets the value to an array with the sharding of `checkpoint_spec`.

        The variable owns the array from then on, and steps may overwrite it in place. Each
        component of an ON_READ variable becomes the value, or its share for aggregation SUM.
        Matches TensorFlow, except that shares of integers are exact.
        """
        if self.on_read:
            if self.aggregation is VariableAggregation.SUM:
                value = variable_value.shares(value, self.strategy.num_replicas_in_sync)
            value = self.strategy._place_variable(self, value)
        self._value = value
