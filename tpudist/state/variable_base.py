"""What a Variable is, and from where it may be used; what it does is in the parts of `Variable`."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tpudist import context
from tpudist.context.closure_place import current_place
from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import placement
from tpudist.reduce_op import VariableAggregation, VariableSynchronization
from tpudist.state import variable_value
from tpudist.values.per_replica import PerReplica
from tpudist.xla.traces import is_eager


class VariableBase:
    """The attributes of a Variable (see there), and what the contexts make of it."""

    name: str
    is_named: bool
    shape: tuple[int, ...]
    dtype: Any
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    constraint: Callable[[jax.Array], Any] | None
    strategy: StrategyBase
    on_read: bool
    is_on_servers = False  # whether a parameter server holds it
    is_counted = False  # whether each replica of a step has a share of it, and they are summed
    remedy: str | None = None  # what to do where replicas would differ; None for as usual
    is_of_closure = False  # whether a worker of a coordinator has made it, for itself
    spec: PartitionSpec | None  # over which axes inside a replica it is split; None if that is open
    _value: Any  # the array, with a leading dim of replicas if `on_read`
    # Sets the value out of all traces: of `Variable`, for those of its parts that compute one.
    _assign_eagerly: Callable[[Any, bool], jax.Array | None]

    def conform(self, value: Any) -> jax.Array:
        """`value` as an array of this variable's shape and dtype; an error if it does not fit."""
        if isinstance(value, PerReplica):
            raise ValueError(
                f"A PerReplica was assigned to variable '{self.name}' in cross-replica context. "
                "Its values differ between replicas, but the variable has one value. Reduce it "
                "first, with strategy.reduce(...), or assign in the replica function."
            )
        return variable_value.conform(value, self.name, self.shape, self.dtype)

    def _fetch(self) -> jax.Array:
        """The array, or a copy of it on the mesh if it is stored elsewhere."""
        storage = self.strategy.storage
        return self._value if storage is None else storage.fetch([self._value])[0]

    def _use_home(self, mode: context.Mode) -> contextlib.AbstractContextManager:
        """What is in force where a new value is computed: not the mesh of another's scope."""
        return placement.without_mesh() if self._is_guest(mode) else contextlib.nullcontext()

    def _is_guest(self, mode: context.Mode) -> bool:
        """Whether this is the scope of another strategy, where ordinary variables may be used."""
        return mode.strategy is not self.strategy and context.has_strategy()

    def _in_cross_replica_context(self, mode: context.Mode) -> bool:
        """Whether the replicas of this variable's strategy are seen from outside, as one."""
        # Out of all scopes one is in replica context, but in that of the default strategy.
        acting = context.resolve_twin(self.strategy)
        inside = mode.replica_context is not None and mode.strategy is acting
        return not inside and not mode.updating

    def _check_usable_here(self, mode: context.Mode, what: str) -> None:
        if self._is_guest(mode) and self.strategy is not context.default_mode().strategy:
            raise RuntimeError(
                f"Variable '{self.name}' was made under {self.strategy!r}, but is {what} in the "
                f"scope of {mode.strategy!r}. Mixing strategies is not supported."
            )
        place = current_place()
        if what == "assigned" and place is not None and place.state and not self.is_of_closure:
            raise RuntimeError(
                f"Variable '{self.name}' was assigned in a function that a coordinator has "
                "scheduled, but is on no server: workers would change it independently, and twice "
                "if a function is restarted. Make it in the scope of the ParameterServerStrategy."
            )
        if not is_eager() and not variable_value.computes_here():
            raise RuntimeError(
                f"Variable '{self.name}' was {what} in a function that jax.jit (or another "
                "transformation) traces, outside of strategy.run: its value would be frozen into "
                "the program. Pass variable.read_value() as an argument, or use strategy.run."
            )
