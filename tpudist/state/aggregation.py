"""Aggregates the replicas' values of a Variable, when it is assigned and when it is read.

A mirrored variable aggregates the values that replicas assign. An ON_READ variable aggregates its
components when it is read in cross-replica context; a value assigned there is split among them.
"""

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization
from tpudist.reductions import cross_device_ops
from tpudist.state import variable_value
from tpudist.state.variable_base import VariableBase
from tpudist.values.per_replica import PerReplica
from tpudist.xla import collectives

_NONE, _SUM = VariableAggregation.NONE, VariableAggregation.SUM
_FIRST = VariableAggregation.ONLY_FIRST_REPLICA


def aggregate_write(variable: VariableBase, value: jax.Array) -> jax.Array:
    """Returns the new value of a mirrored variable to which each replica assigns its `value`.

    Works in a trace only.

    Raises:
        ValueError: If the aggregation is MEAN and the dtype is an integer.
    """
    if variable.aggregation is _NONE:
        return value  # after the trace, `run` proves that it is equal on all replicas
    return _aggregate_in_trace(variable, value)


def _aggregate_in_trace(variable: VariableBase, value: jax.Array) -> jax.Array:
    if variable.strategy.num_replicas_in_sync == 1:
        return value
    if variable.aggregation is _FIRST:
        return collectives.broadcast(value)
    is_integer = not jnp.issubdtype(variable.dtype, jnp.inexact)
    if variable.aggregation is VariableAggregation.MEAN and is_integer:
        raise ValueError(
            f"Variable '{variable.name}' has dtype {variable.dtype}, but its aggregation MEAN of "
            "the assigned values would not stay an integer. Use a floating dtype, or SUM."
        )
    op = ReduceOp.from_variable_aggregation(variable.aggregation)
    return cross_device_ops.reduce(op, value)


def aggregate_read(variable: VariableBase, local: jax.Array) -> jax.Array:
    """Returns an ON_READ variable's value in cross-replica context of a trace.

    Args:
        variable: The variable.
        local: This replica's component.
    """
    check_readable(variable)
    return _aggregate_in_trace(variable, local)


def aggregate_components(variable: VariableBase) -> jax.Array:
    """Returns an ON_READ variable's value in cross-replica context, outside of traces."""
    check_readable(variable)
    if variable.aggregation is _FIRST:
        return variable._value[0]
    op = ReduceOp.from_variable_aggregation(variable.aggregation)
    return variable.strategy.reduce(op, PerReplica(variable._value), axis=None)


def split_value(variable: VariableBase, value: jax.Array) -> jax.Array:
    """Returns this replica's component of a value assigned in cross-replica context of a trace."""
    if variable.aggregation is not _SUM:
        return value
    shares = variable_value.shares(value, variable.strategy.num_replicas_in_sync)
    return shares[collectives.replica_id()]


def is_readable(variable: VariableBase) -> bool:
    """Whether the variable has one value in cross-replica context."""
    return not (variable.on_read and variable.aggregation is _NONE)


def check_readable(variable: VariableBase) -> None:
    """Raises `ValueError` for an ON_READ variable with aggregation NONE."""
    if not is_readable(variable):
        raise ValueError(
            f"ON_READ variable '{variable.name}' was read in cross-replica context, but its "
            "aggregation is NONE, so its components have no single value. Read them with "
            "strategy.experimental_local_results, or make the variable with an aggregation."
        )


def refuse_number_to_sum(variable: VariableBase, value: object, mode: context.Mode) -> None:
    """Raises `ValueError` if several replicas assign a plain number to a variable that sums."""
    # As declared: `on_read` is False where a strategy has no components.
    is_on_read = variable.synchronization is VariableSynchronization.ON_READ
    in_replica = mode.replica_context is not None and not is_on_read
    is_number = isinstance(value, int | float | complex) and not isinstance(value, bool)
    if in_replica and is_number and variable.aggregation is _SUM:
        n = variable.strategy.num_replicas_in_sync
        if n > 1:
            raise ValueError(
                f"The number {value!r} was assigned to variable '{variable.name}', which sums the "
                f"values that its replicas assign: {n} replicas would make it {n} times as large. "
                "Use aggregation ONLY_FIRST_REPLICA for a number that is the same on all replicas."
            )
