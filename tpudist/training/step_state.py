"""The state of a run: what the step is given and gives back, and its names in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpudist.checkpoint.entries import Container
from tpudist.checkpoint.train_state import TrainState
from tpudist.training import step_results

_OF_THE_RUN = ("step", "batches", "history")
_NAMES = ("model", "optimizer")
_OBJECT_TYPES = (nnx.Pytree, nnx.Variable)


class StepState:
    """What the step is given before the batch.

    Attributes:
        checkpoint: It, by the names that it has in checkpoints.
        is_changed_in_place: Whether there is anything that a step can change without returning it.
    """

    def __init__(self, state: Any):
        """Of what `train` was given as `state`."""
        self._given = state
        if isinstance(state, Container):
            objects = state.checkpoint_objects()
            self._names = [k for k, x in objects.items() if k not in _OF_THE_RUN and x is not None]
            self.checkpoint: Any = state
        else:
            parts = state if type(state) is tuple else (state,)
            self._names = [*_NAMES, *(f"state_{i}" for i in range(2, len(parts)))][: len(parts)]
            if type(state) is not tuple and not isinstance(state, _OBJECT_TYPES):
                self._names = ["state"]
            self.checkpoint = TrainState(**dict(zip(self._names, parts, strict=True)))
        self.is_changed_in_place = not self.parts or any(map(_holds_objects, self.parts))
        if not self.is_changed_in_place:
            for name, part in zip(self._names, self.parts, strict=True):
                # Steps give back arrays in the place of numbers, and so do checkpoints.
                setattr(self.checkpoint, name, jax.tree.map(_to_array, part))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The arguments of the step before the batch, as they are now."""
        return tuple(getattr(self.checkpoint, name) for name in self._names)

    @property
    def value(self) -> Any:
        """The state as it is now, in the form in which it was given."""
        if isinstance(self._given, Container):
            return self._given
        return self.parts if type(self._given) is tuple else self.parts[0]

    def take(self, result: Any) -> Mapping[str, Any]:
        """Takes up the state that a step has returned, if it has; gives its metrics.

        Raises:
            TypeError: It has returned neither metrics nor a state and metrics, or no state where
                that does not change in place.
        """
        if isinstance(result, Mapping):
            if not self.is_changed_in_place:
                step_results.refuse_metrics_alone(self._names)
            return result
        if not (type(result) is tuple and len(result) == 2 and isinstance(result[1], Mapping)):
            step_results.refuse_result(result)
        state, metrics = result
        is_one = len(self._names) == 1 and type(self._given) is not tuple
        parts = (state,) if is_one else state
        if type(parts) is not tuple or len(parts) != len(self._names):
            step_results.refuse_state(state, self._names)
        for name, part in zip(self._names, parts, strict=True):
            setattr(self.checkpoint, name, part)
        return metrics


def _to_array(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, bool | int | float) else leaf


def _holds_objects(part: Any) -> bool:
    """Whether a step can change something in a part of the state."""
    leaves = jax.tree.leaves(part, is_leaf=lambda x: isinstance(x, _OBJECT_TYPES))
    return any(isinstance(x, _OBJECT_TYPES) or not _is_constant(x) for x in leaves)


def _is_constant(leaf: Any) -> bool:
    """Whether a leaf of a plain pytree stays what it is: an array, a number, or a function."""
    return isinstance(
        leaf, jax.Array | np.ndarray | np.generic | complex | float | int
    ) or callable(leaf)
