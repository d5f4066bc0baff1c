"""Checks the results of steps and evaluations; each error says what to return instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from tpudist.values.per_replica import PerReplica


def result_error(result: object) -> TypeError:
    """Returns the error for a step that returned neither metrics nor a state and metrics."""
    return TypeError(
        f"The step returned {_describe(result)}. It must return a mapping of names to scalars, "
        f'such as {{"loss": loss}}. If its state is plain pytrees, return the new state and '
        f'that mapping: return state, {{"loss": loss}}.'
    )


def state_error(state: object, names: Sequence[str]) -> TypeError:
    """Returns the error for a step that returned a state of another structure."""
    return TypeError(
        f"The step returned {_describe(state)} as its new state, but received {len(names)} "
        f"part(s) of state ({', '.join(names)}). Return a tuple of {len(names)}, in the order of "
        f"the arguments."
    )


def no_state_error(names: Sequence[str]) -> TypeError:
    """Returns the error for a step that returned only metrics, so its state would never change."""
    return TypeError(
        f"The step returned metrics but no state. Its state ({', '.join(names)}) is plain pytrees "
        f"of arrays, which a step cannot change in place, so it would learn nothing. Return the "
        f'new state too: return state, {{"loss": loss}}. Or use NNX objects or Variables as the '
        f"state."
    )


def check_metrics(metrics: Mapping[str, object]) -> None:
    """Checks that metrics are scalars.

    Raises:
        TypeError: If a metric is not a scalar.
        ValueError: If a metric differs between replicas.
    """
    for name, value in metrics.items():
        if isinstance(value, PerReplica):
            raise ValueError(
                f"The metric {name!r} differs between replicas, but must be one number. Combine "
                f'it in the step with tpudist.get_replica_context().all_reduce("sum", {name}), '
                f'which is right after tpudist.compute_average_loss, or with "mean".'
            )
        # The type and the shape are known without waiting for the device; the value is not read
        # here.
        is_number = isinstance(value, jax.Array | np.ndarray | np.number | int | float)
        if not isinstance(name, str) or not is_number or np.shape(value) != ():
            raise TypeError(
                f"The metric {name!r} is {_describe(value)}, but must be a scalar, an array of "
                f"shape (). Take its mean or its sum."
            )


def read_evaluation(measured: object) -> dict[str, float]:
    """Returns the result of an evaluation as numbers.

    Raises:
        TypeError: If the result is not a mapping of names to scalars.
        ValueError: If a number differs between replicas.
    """
    if not isinstance(measured, Mapping):
        raise TypeError(
            f"evaluate returned {_describe(measured)}. It must return a mapping of names to "
            f'numbers, such as {{"accuracy": 0.9}}.'
        )
    check_metrics(measured)
    return {name: float(value) for name, value in measured.items()}


def _describe(value: object) -> str:
    """Returns "a float32[8]" or "a tuple"."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"a {value.dtype}[{','.join(map(str, value.shape))}]"
    return "None" if value is None else f"a {type(value).__name__}"
