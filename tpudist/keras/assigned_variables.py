"""Keras' variables that replica functions assign, as Variables of the strategy that runs them.

What a step assigns is written back to Keras when it has been dispatched. A variable is one value
for all replicas, by the rule that it has been given (`aggregation`, `synchronization`); without a
rule replicas must assign the same, which is proven. What is counted on each replica (the sums of
metrics) is the first one's at the start of a step, and nothing on the others, so that the sum over
replicas counts what there was before once.
"""

import traceback
import weakref
from collections.abc import Iterator
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import keras

from tpudist import context
from tpudist.context.frame import Frame
from tpudist.context.strategy_base import StrategyBase
from tpudist.keras import keras_internals, optimizer_sums
from tpudist.reduce_op import VariableAggregation, VariableSynchronization
from tpudist.state import aggregation
from tpudist.state.variable import Variable
from tpudist.xla.hlo.source_lines import line_of_call
from tpudist.xla.traces import is_eager

_STATISTICS = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")


class AssignedVariable(Variable):
    """A variable of Keras under one strategy: what it holds is Keras' array."""

    remedy = (
        "A Keras optimizer sums the gradients over the replicas. For other values, all-reduce what "
        "you assign (tpudist.get_replica_context().all_reduce('mean', value)), or make the "
        "variable with an aggregation: add_weight(..., aggregation='mean'), 'sum' or "
        "'only_first_replica'."
    )

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """A new one, also while a function is being traced."""
        return cast(Self, object.__new__(cls))

    def __init__(self, variable: Any, strategy: StrategyBase):
        """Of `variable`, where functions of `strategy` assign it."""
        self.name, self.is_named = variable.path, True
        held = keras_internals.array_of(variable)
        self.shape, self.dtype = tuple(held.shape), held.dtype
        self.trainable, self.constraint = variable.trainable, None
        self.strategy, self.spec = strategy, None
        self.on_read = self.belongs_to_closure = False
        self.synchronization = VariableSynchronization.ON_WRITE
        self.aggregation = VariableAggregation[variable.aggregation.upper()]
        self._components = weakref.WeakValueDictionary()
        self.is_counted = (
            variable.synchronization == "on_read" and self.aggregation is VariableAggregation.SUM
        )
        self._variable, self._seen = variable, None
        strategy._register_variable(self)

    @property
    def _value(self) -> Any:
        value = keras_internals.array_of(self._variable)
        if value is None:  # no function reads it now: those that would are refused
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        if value is not self._seen and is_eager():  # in a trace its shape is asked for, and no more
            self.strategy._protect_from_donation(self)  # who else has it is not known
            if not self.strategy.replica_mesh.has_whole(value):
                value = self.strategy.replicate(value)
                keras_internals.set_array(self._variable, value)
            self._seen = value
        return value

    @_value.setter
    def _value(self, value: Any) -> None:
        if not isinstance(value, jax.ShapeDtypeStruct):
            self._seen = value
            keras_internals.set_array(self._variable, value)

    def is_of(self, variable: Any) -> bool:
        """Whether it is that variable of Keras."""
        return self._variable is variable

    def read_in(self, frame: Frame) -> jax.Array:
        """What a trace reads.

        Raises:
            RuntimeError: It is what a metric has counted, and a replica asks for the result.
        """
        value = frame.get(self)
        if not self._is_shared_out(frame):
            return value
        if context.current().replica_context is None:
            return aggregation.aggregate_read(self, value)
        if next(_callers(keras.metrics.Metric, "result"), None) is not None:
            raise RuntimeError(
                f"The result of a Keras metric ('{self.name}') was read in a function that "
                f"{self.strategy!r} runs on its replicas, at {line_of_call()}. Each replica has "
                "counted only its own part. Read it after strategy.run: metric.result()."
            )
        return value

    def assign_in(self, frame: Frame, value: jax.Array) -> jax.Array:
        """What it is after a trace has assigned `value`, of its shape and dtype."""
        value = frame.detach(value)
        in_replica = context.current().replica_context is not None
        if self._is_shared_out(frame):
            if not in_replica:
                value = aggregation.split_value(self, value)
        # What an optimizer assigns of gradients that were summed is equal, which is proven.
        elif in_replica and not optimizer_sums.are_applied():
            if self._is_statistic():
                self.aggregation = VariableAggregation.MEAN
            value = aggregation.aggregate_write(self, value)
        return frame.set(self, value)

    def _is_statistic(self) -> bool:
        """Whether batch norm assigns it, as what it has seen of its batches: Keras says no rule."""
        return any(
            getattr(layer, name, None) is self._variable
            for layer in _callers(keras.layers.BatchNormalization, "call")
            for name in _STATISTICS
        )

    def _is_shared_out(self, frame: Frame) -> bool:
        return self.is_counted and not frame.whole and self.strategy.num_replicas_in_sync > 1


class Assigned(dict[int, AssignedVariable]):
    """What a variable of Keras is to strategies, by their ids; no part of its copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Assigned":
        """None, of a copy of the variable."""
        return Assigned()

    def __reduce__(self):
        return Assigned, ()


def find(variable: Any, frame: Frame) -> AssignedVariable | None:
    """What a variable of Keras is to a trace; None if no function has assigned it."""
    found = getattr(variable, "tpudist_assigned", {}).get(id(_owner(frame)))
    # One that was copied with all its attributes is another variable.
    return found if found is not None and found.is_of(variable) else None


def find_or_make(variable: Any, frame: Frame) -> AssignedVariable:
    """The same, from now on."""
    found = find(variable, frame)
    if found is None:
        found = AssignedVariable(variable, _owner(frame))
        others = getattr(variable, "tpudist_assigned", {}).values()
        kept = {id(x.strategy): x for x in (*others, found) if x.is_of(variable)}
        variable.tpudist_assigned = Assigned(kept)
        # Its value is no input of this trace, which goes on to find the others, and is dropped.
        frame.begin_variable(found, jnp.zeros(found.shape, found.dtype), computed=False)
    return found


def _owner(frame: Frame) -> StrategyBase:
    return frame.strategy._twin_of or frame.strategy


def _callers(kind: type, method: str) -> Iterator[Any]:
    """The objects of some class of which a method is under way: Keras does not say who asks."""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_name == method and isinstance(frame.f_locals.get("self"), kind):
            yield frame.f_locals["self"]
