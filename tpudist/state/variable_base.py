"""Attributes of a Variable, and checks of the context in which it is used.

Base of the mix-ins that make up `Variable`: `ScatterUpdates`, `SavedInCheckpoints`.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tpudist import context
from tpudist.array_types import Shape
from tpudist.context.closure_place import current_place
from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import placement
from tpudist.reduce_op import VariableAggregation, VariableSynchronization
from tpudist.state import variable_value
from tpudist.state.variable_value import VariableValue
from tpudist.values.per_replica import PerReplica
from tpudist.xla.traces import is_eager


class VariableBase:
    """Attributes that all parts of a Variable use; `Variable` documents the public ones."""

    name: str
    is_named: bool
    shape: Shape
    dtype: Any
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    constraint: Callable[[jax.Array], Any] | None
    strategy: StrategyBase
    on_read: bool
    is_on_servers = False  # whether a parameter server stores it
    is_counted = False  # whether it counts: each replica of a step adds its share to the sum
    remedy: str | None = None  # advice in the error about differing replicas; None: the default
    belongs_to_closure = False  # whether a scheduled function made it, on its worker
    spec: PartitionSpec | None  # axes inside a replica that split it; None: the strategy decides
    _value: Any  # the array, with a leading dim of replicas if `on_read`
    # Implemented by `Variable`: sets the value outside of traces. The mix-ins call it.
    _assign_eagerly: Callable[[VariableValue, bool], jax.Array | None]

    def conform(self, value: VariableValue) -> jax.Array:
        """Returns `value` as an array of this variable's shape and dtype.

        Raises:
            ValueError: If the value does not fit, or is a PerReplica.
        """
        if isinstance(value, PerReplica):
            raise ValueError(
                f"A PerReplica was assigned to variable '{self.name}' in cross-replica context. "
                "Its values differ between replicas, but the variable has one value. Reduce it "
                "first, with strategy.reduce(...), or assign in the replica function."
            )
        return variable_value.conform(value, self.name, self.shape, self.dtype)

    def _fetch(self) -> jax.Array:
        """Returns the array, or a copy of it on the mesh if it is stored elsewhere."""
        storage = self.strategy.storage
        return self._value if storage is None else storage.fetch([self._value])[0]

    def _use_home(self, mode: context.Mode) -> contextlib.AbstractContextManager:
        """Returns a context that computes on this variable's devices, not on those of the scope."""
        return placement.without_mesh() if self._is_foreign(mode) else contextlib.nullcontext()

    def _is_foreign(self, mode: context.Mode) -> bool:
        """Whether the scope is another strategy's. Only ordinary variables may be used there."""
        return mode.strategy is not self.strategy and context.has_strategy()

    def _in_cross_replica_context(self, mode: context.Mode) -> bool:
        """Whether code here sees all replicas of this variable's strategy at once."""
        # Outside of all scopes the code is in replica context, but of the default strategy. That
        # is cross-replica context for a variable of any other strategy. While a plan is made, a
        # twin runs in place of the strategy.
        acting = context.resolve_twin(self.strategy)
        in_replica = mode.replica_context is not None and mode.strategy is acting
        return not in_replica and not mode.is_update

    def _check_usable_here(self, mode: context.Mode, action: str) -> None:
        """Raises `RuntimeError` if the variable must not be used here.

        Args:
            mode: The current mode.
            action: `read` or `assigned`, for the message and for the rules of closures.
        """
        if self._is_foreign(mode) and self.strategy is not context.default_mode().strategy:
            raise RuntimeError(
                f"Variable '{self.name}' was made under {self.strategy!r}, but is {action} in the "
                f"scope of {mode.strategy!r}. Mixing strategies is not supported."
            )
        place = current_place()
        in_closure = place is not None and place.state
        if action == "assigned" and in_closure and not self.belongs_to_closure:
            raise RuntimeError(
                f"Variable '{self.name}' was assigned in a function that a coordinator has "
                "scheduled, but is on no server: workers would change it independently, and twice "
                "if a function is restarted. Make it in the scope of the ParameterServerStrategy."
            )
        if not is_eager() and not variable_value.computes_here():
            raise RuntimeError(
                f"Variable '{self.name}' was {action} in a function that jax.jit (or another "
                "transformation) traces, outside of strategy.run: its value would be frozen into "
                "the program. Pass variable.read_value() as an argument, or use strategy.run."
            )
