"""How the replicas' values of a Variable become one: where it is assigned, and where it is read.

A mirrored variable aggregates what replicas assign; an ON_READ one its components, when it is read
in cross-replica context, and what is assigned to it there is shared out among them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization
from tpudist.reductions import cross_device_ops
from tpudist.state import variable_value
from tpudist.state.variable_base import VariableBase
from tpudist.values.per_replica import PerReplica
from tpudist.xla import collectives

_NONE, _SUM, _FIRST = (VariableAggregation[x] for x in ("NONE", "SUM", "ONLY_FIRST_REPLICA"))


def aggregate_write(variable: VariableBase, value: jax.Array) -> jax.Array:
    """What a mirrored variable becomes when each replica assigns its `value`, in a trace.

    Raises:
        ValueError: Integers are to be averaged.
    """
    if variable.aggregation is _NONE:
        return value  # that it is equal everywhere is proven when the function has been traced
    if variable.strategy.num_replicas_in_sync == 1:
        return value
    if variable.aggregation is _FIRST:
        return collectives.broadcast(value)
    whole = not jnp.issubdtype(variable.dtype, jnp.inexact)
    if variable.aggregation is VariableAggregation.MEAN and whole:
        raise ValueError(
            f"Variable '{variable.name}' has dtype {variable.dtype}, but its aggregation MEAN of "
            "the assigned values would not stay an integer. Use a floating dtype, or SUM."
        )
    op = ReduceOp.from_variable_aggregation(variable.aggregation)
    return cross_device_ops.reduce(op, value)


def aggregate_read(variable: VariableBase, local: jax.Array) -> jax.Array:
    """What an ON_READ variable is in cross-replica context of a trace.

    Args:
        variable: The variable.
        local: This replica's component.
    """
    check_readable(variable)
    return aggregate_write(variable, local)


def aggregate_components(variable: VariableBase) -> jax.Array:
    """What an ON_READ variable is in cross-replica context, out of all traces."""
    check_readable(variable)
    if variable.aggregation is _FIRST:
        return variable._value[0]
    op = ReduceOp.from_variable_aggregation(variable.aggregation)
    return variable.strategy.reduce(op, PerReplica(variable._value), axis=None)


def split_value(variable: VariableBase, value: jax.Array) -> jax.Array:
    """This replica's component of what is assigned in cross-replica context of a trace."""
    if variable.aggregation is not _SUM:
        return value
    shares = variable_value.shares(value, variable.strategy.num_replicas_in_sync)
    return shares[collectives.replica_id()]


def is_readable(variable: VariableBase) -> bool:
    """Whether the variable has one value in cross-replica context."""
    return not (variable.on_read and variable.aggregation is _NONE)


def check_readable(variable: VariableBase) -> None:
    """Refuses to read an ON_READ variable without aggregation in cross-replica context."""
    if not is_readable(variable):
        raise ValueError(
            f"ON_READ variable '{variable.name}' was read in cross-replica context, but its "
            "aggregation is NONE, so its components have no single value. Read them with "
            "strategy.experimental_local_results, or make the variable with an aggregation."
        )


def check_number(variable: VariableBase, value: Any, mode: context.Mode) -> None:
    """Refuses a plain number that several replicas assign to a variable that sums."""
    on_read = variable.synchronization is VariableSynchronization.ON_READ
    in_replica = mode.replica_context is not None and not on_read
    number = isinstance(value, int | float | complex) and not isinstance(value, bool)
    if in_replica and number and variable.aggregation is _SUM:
        n = variable.strategy.num_replicas_in_sync
        if n > 1:
            raise ValueError(
                f"The number {value!r} was assigned to variable '{variable.name}', which sums the "
                f"values that its replicas assign: {n} replicas would make it {n} times as large. "
                "Use aggregation ONLY_FIRST_REPLICA for a number that is the same on all replicas."
            )
