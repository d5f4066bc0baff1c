"""What steps and evaluations return: metrics that can be told, or an error that says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from tpudist.values.per_replica import PerReplica


def refuse_result(result: Any) -> NoReturn:
    """Refuses what a step has returned.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        f"The step returned {_describe(result)}. It must return a mapping of names to scalars, "
        f'such as {{"loss": loss}}. If its state is plain pytrees, return the new state and '
        f'that mapping: return state, {{"loss": loss}}.'
    )


def refuse_state(state: Any, names: Sequence[str]) -> NoReturn:
    """Refuses the state that a step has returned.

    Raises:
        TypeError: Always.
    """
    wanted = f"a tuple of {len(names)}" if len(names) != 1 else "a tuple of 1"
    raise TypeError(
        f"The step returned {_describe(state)} as its new state, but received {len(names)} "
        f"part(s) of state ({', '.join(names)}). Return {wanted}, in the order of the arguments."
    )


def refuse_metrics_alone(names: Sequence[str]) -> NoReturn:
    """Refuses a step whose state stays what it was.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        f"The step returned metrics but no state. Its state ({', '.join(names)}) is plain pytrees "
        f"of arrays, which a step cannot change in place, so it would learn nothing. Return the "
        f'new state too: return state, {{"loss": loss}}. Or use NNX objects or Variables as the '
        f"state."
    )


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Sees that metrics can be told.

    Raises:
        TypeError: A metric is no scalar.
        ValueError: A metric differs between replicas.
    """
    for name, value in metrics.items():
        if isinstance(value, PerReplica):
            raise ValueError(
                f"The metric {name!r} differs between replicas, but must be one number. Combine "
                f'it in the step with tpudist.get_replica_context().all_reduce("sum", {name}), '
                f'which is right after tpudist.compute_average_loss, or with "mean".'
            )
        is_number = isinstance(value, jax.Array | np.ndarray | np.number | int | float)
        if not isinstance(name, str) or not is_number or np.shape(value) != ():
            raise TypeError(
                f"The metric {name!r} is {_describe(value)}, but must be a scalar, an array of "
                f"shape (). Take its mean or its sum."
            )


def read_evaluation(measured: Any) -> dict[str, float]:
    """What an evaluation has measured, as numbers.

    Raises:
        TypeError: It is no mapping of names to scalars.
        ValueError: A number differs between replicas.
    """
    if not isinstance(measured, Mapping):
        raise TypeError(
            f"evaluate returned {_describe(measured)}. It must return a mapping of names to "
            f'numbers, such as {{"accuracy": 0.9}}.'
        )
    check_metrics(measured)
    return {name: float(value) for name, value in measured.items()}


def _describe(value: Any) -> str:
    """As "a float32[8]" or "a tuple"."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"a {value.dtype}[{','.join(map(str, value.shape))}]"
    return "None" if value is None else f"a {type(value).__name__}"
