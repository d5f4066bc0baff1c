"""Values that drifted: a call returned one per replica in the place of a value equal on all.

That is intended for an accumulator. For parameters it is a forgotten reduction: each replica then
trains its own model. Such a value is recorded when a call returns it, and an error is raised when
it is used.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax

from tpudist.context.weak_identity import WeakIdentityDict
from tpudist.values.per_replica import PerReplica


@dataclasses.dataclass(frozen=True)
class Drift:
    """A value for each replica in the place of a value that was equal on all.

    Attributes:
        leaf: The argument that had the equal value.
        function: The function that returned the value.
        cause: The reason why it differs between replicas.
        where: The user's line that computes it, `file:line`; empty if unknown.
        advice: The result of `advice_on_value`.
    """

    leaf: str
    function: str
    cause: str
    where: str
    advice: str = ""


def advice_on_value(names: Iterable[str]) -> str:
    """Returns the advice for `value=` if the state belongs to an optimizer with that argument.

    Args:
        names: Names of the state.
    """
    if not any("plateau_count" in name for name in names):  # `optax.contrib.reduce_on_plateau`
        return ""
    return (
        " Also all-reduce the value= argument of the optimizer (reduce_on_plateau): "
        "value=tpudist.get_replica_context().all_reduce('sum', loss)."
    )


# By identity of the stacked array: a PerReplica is flattened and rebuilt on its way between calls,
# but keeps its array.
_records = WeakIdentityDict()


def record(value: PerReplica, drift: Drift) -> PerReplica:
    """Records a value in the place of a value that was equal on all replicas."""
    # The first record stays: it names the call that caused the drift.
    _records.setdefault(value.array, drift)
    return value


def check(values: Sequence[object], names: Sequence[str], user: str) -> None:
    """Raises an error if a value has drifted.

    Args:
        values: The values: PerReplicas, their arrays, or anything else.
        names: Names of the values.
        user: The function that uses the values, for the message.

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
            f"{user} received '{name}', which differs between replicas. It was equal on all of "
            f"them ('{drift.leaf}') before the call of '{drift.function}'; that call returned one "
            f"value for each replica instead{where}, because it depends on {drift.cause} and was "
            "not reduced. Each replica would continue with a different model. Reduce the "
            "gradients: tpudist.get_replica_context().all_reduce('mean', grads), or 'sum' for a "
            f"loss divided by the rows of all replicas (compute_average_loss).{drift.advice} If "
            "each replica must keep its own value, start with one value per replica: "
            "strategy.experimental_distribute_values_from_function(...); or pass "
            "RunOptions(aggregation='none')."
        )
