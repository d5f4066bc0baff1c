"""Represents Keras variables that replica functions assign as Variables of a strategy.

A step writes its values back to Keras when it has been dispatched. A variable has one value for all
replicas, combined by its own rule (`aggregation`, `synchronization`). Without a rule, replicas must
assign equal values, and tpudist proves that they do.
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
from tpudist.keras.variable_notes import read_notes, write_notes
from tpudist.reduce_op import VariableAggregation, VariableSynchronization
from tpudist.state import aggregation
from tpudist.state.variable import Variable
from tpudist.xla.traces import is_eager
from tpudist.xla.user_code import line_of_call

# The attributes of BatchNormalization for the statistics that it assigns.
_STATISTICS = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")


class AssignedVariable(Variable):
    """A Keras variable under one strategy. Its value is the array of the Keras variable.

    Args:
        variable: The Keras variable.
        strategy: Strategy whose functions assign it.
    """

    remedy = (
        "A Keras optimizer sums the gradients over the replicas. For other values, all-reduce what "
        "you assign (tpudist.get_replica_context().all_reduce('mean', value)), or make the "
        "variable with an aggregation: add_weight(..., aggregation='mean'), 'sum' or "
        "'only_first_replica'."
    )

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        """Returns a new object, also in a trace: `Variable.__new__` would reuse an earlier one."""
        return cast(Self, object.__new__(cls))

    def __init__(self, variable: keras.Variable, strategy: StrategyBase):
        self.name, self.is_named = variable.path, True
        array = keras_internals.array_of(variable)
        self.shape, self.dtype = tuple(array.shape), array.dtype
        self.trainable, self.constraint = variable.trainable, None
        self.strategy, self.spec = strategy, None
        self.on_read = self.belongs_to_closure = False
        self.synchronization = VariableSynchronization.ON_WRITE
        self.aggregation = VariableAggregation[variable.aggregation.upper()]
        self._components = weakref.WeakValueDictionary()
        # A metric is counted separately on each replica, and summed when it is read. At the start
        # of a step, the first replica has the old value and the others have 0, so that the sum
        # counts the old value once.
        self.is_counted = (
            variable.synchronization == "on_read" and self.aggregation is VariableAggregation.SUM
        )
        # `_seen` is the last array that this object has stored or checked. If the Keras variable
        # has another array, somebody else has assigned it.
        self._variable, self._seen = variable, None
        strategy._register_variable(self)

    @property
    def _value(self) -> Any:
        value = keras_internals.array_of(self._variable)
        if value is None:  # while `fit` runs; a function that reads it raises an error
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        if value is not self._seen and is_eager():  # a trace reads only the shape
            self.strategy._protect_from_donation(self)  # its other users are unknown
            if not self.strategy.replica_mesh.has_whole(value):
                value = self.strategy.replicate(value)
                keras_internals.set_array(self._variable, value)
            self._seen = value
        return value

    @_value.setter
    def _value(self, value: jax.Array | jax.ShapeDtypeStruct) -> None:
        if not isinstance(value, jax.ShapeDtypeStruct):
            self._seen = value
            keras_internals.set_array(self._variable, value)

    def read_in(self, frame: Frame) -> jax.Array:
        """Returns the value in a trace.

        Raises:
            RuntimeError: If a replica computes the result of a metric, since it has counted only
                its own part.
        """
        value = frame.get(self)
        if not self._has_parts_on_replicas(frame):
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
        """Assigns `value`, of the right shape and dtype, in a trace; returns the new value."""
        value = frame.detach(value)
        in_replica = context.current().replica_context is not None
        if self._has_parts_on_replicas(frame):
            if not in_replica:
                value = aggregation.split_value(self, value)
        # An optimizer assigns equal values, because its gradients were summed. The trace proves it.
        elif in_replica and not optimizer_sums.is_applying_sums():
            if self._is_statistic():
                # For the rest of its life, so that the next trace averages it as well.
                self.aggregation = VariableAggregation.MEAN
            value = aggregation.aggregate_write(self, value)
        return frame.set(self, value)

    def _is_statistic(self) -> bool:
        # Keras gives the statistics of batch normalization no rule. Here they are averaged.
        return any(
            getattr(layer, name, None) is self._variable  # a Keras layer may lack some
            for layer in _callers(keras.layers.BatchNormalization, "call")
            for name in _STATISTICS
        )

    def _has_parts_on_replicas(self, frame: Frame) -> bool:
        return self.is_counted and not frame.whole and self.strategy.num_replicas_in_sync > 1


def find(variable: keras.Variable, frame: Frame) -> AssignedVariable | None:
    """Returns the Variable for a Keras variable in a trace; None if no function has assigned it."""
    return read_notes(variable).assigned.get(id(_strategy_of(frame)))


def find_or_make(variable: keras.Variable, frame: Frame) -> AssignedVariable:
    """Returns the Variable for a Keras variable in a trace, and creates it at the first call."""
    assigned = find(variable, frame)
    if assigned is None:
        strategy = _strategy_of(frame)
        assigned = write_notes(variable).assigned[id(strategy)] = AssignedVariable(
            variable, strategy
        )
        # This trace did not start with the variable as an input, so it begins with zeros. The trace
        # continues only to find further variables, and is then repeated with all of them.
        frame.begin_variable(assigned, jnp.zeros(assigned.shape, assigned.dtype), computed=False)
    return assigned


def _strategy_of(frame: Frame) -> StrategyBase:
    return frame.strategy._twin_of or frame.strategy


def _callers(kind: type, method: str) -> Iterator[Any]:
    """Yields the objects of a class whose `method` is on the call stack."""
    # Keras does not pass its caller to a variable, so the stack is the only source.
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_name == method and isinstance(frame.f_locals.get("self"), kind):
            yield frame.f_locals["self"]
