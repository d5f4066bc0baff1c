"""Values that a call made, one for each replica, in the place of a value that was equal on all.

For an accumulator that is meant. For parameters it is a forgotten reduction: each replica then
trains a model of its own. Such a value is recorded when it is made, and an error when it is used.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from tpudist.context.weak_identity import WeakIdentityDict
from tpudist.values.per_replica import PerReplica


@dataclasses.dataclass(frozen=True)
class Drift:
    """A value for each replica, made in the place of a value that was equal on all.

    Attributes:
        leaf: The argument that had the equal value.
        function: The function that made the value.
        cause: The reason why it differs between replicas.
        where: The user's line where it was made, `file:line`; empty if unknown.
        advice: More that is to be reduced, as `advice_on_value` says; empty if nothing.
    """

    leaf: str
    function: str
    cause: str
    where: str
    advice: str = ""


def advice_on_value(names: Iterable[str]) -> str:
    """Returns what to do about the `value=` of an optimizer, if its state is of one given that.

    Args:
        names: The names of the state.
    """
    if not any("plateau_count" in name for name in names):  # of `optax.contrib.reduce_on_plateau`
        return ""
    return (
        " Also all-reduce the value= argument of the optimizer (reduce_on_plateau): "
        "value=tpudist.get_replica_context().all_reduce('sum', loss)."
    )


_records = WeakIdentityDict()


def record(value: PerReplica, drift: Drift) -> PerReplica:
    """Records a value that was made in the place of an equal value."""
    _records.setdefault(value.array, drift)
    return value


def check(values: Sequence[Any], names: Sequence[str], what: str) -> None:
    """Raises an error if a value has drifted.

    Args:
        values: The values that are used: PerReplicas, or their arrays.
        names: The names of the values.
        what: The use of the values, for the message.

    Raises:
        ValueError: If a value was equal on all replicas before the call that returned it.
    """
    for value, name in zip(values, names, strict=True):
        array = value.array if isinstance(value, PerReplica) else value
        drift = _records.get(array) if isinstance(array, jax.Array) else None
        if drift is None:
            continue
        where = f" at {drift.where}" if drift.where else ""
        raise ValueError(
            f"{what} received '{name}', which differs between replicas. It was equal on all of "
            f"them ('{drift.leaf}') before the call of '{drift.function}'; that call returned one "
            f"value for each replica instead{where}, because it depends on {drift.cause} and was "
            "not reduced. Each replica would continue with a different model. Reduce the "
            "gradients: tpudist.get_replica_context().all_reduce('mean', grads), or 'sum' for a "
            f"loss divided by the rows of all replicas (compute_average_loss).{drift.advice} If "
            "each replica must keep its own value, start with one value per replica: "
            "strategy.experimental_distribute_values_from_function(...); or pass "
            "RunOptions(aggregation='none')."
        )
