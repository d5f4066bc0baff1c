"""The state of a run: the arguments and results of the step, and their names in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpudist.array_types import PyTree
from tpudist.checkpoint import Checkpoint
from tpudist.checkpoint.holders import Container
from tpudist.checkpoint.train_state import TrainState
from tpudist.training import step_results

_RUN_ATTRIBUTES = ("step", "batches", "history")  # `train` sets them; the step does not get them
_NAMES_OF_FIRST_PARTS = ("model", "optimizer")
_OBJECT_TYPES = (nnx.Pytree, nnx.Variable)


class StepState:
    """Arguments of the step before the batch.

    Args:
        state: Argument `state` of `train`.
        saved: Part of the state that checkpoints contain; None for all of it.

    Attributes:
        saved: Content of the checkpoints.
        is_changed_in_place: Whether a step can change anything without returning it.

    Raises:
        ValueError: If there is a `saved`, but steps return a new state.
    """

    def __init__(self, state: object, saved: Checkpoint | None = None):
        self._state = state
        if isinstance(state, Container):
            objects = state.checkpoint_objects()
            names = [k for k, x in objects.items() if k not in _RUN_ATTRIBUTES and x is not None]
            # `Any`, because the names of the attributes are not known here.
            self._container: Any = state
        else:
            parts = state if type(state) is tuple else (state,)
            if type(state) is tuple or isinstance(state, _OBJECT_TYPES):
                others = (f"state_{i}" for i in range(2, len(parts)))
                names = [*_NAMES_OF_FIRST_PARTS, *others][: len(parts)]
            else:
                names = ["state"]  # a single pytree is not a model
            self._container = TrainState(**dict(zip(names, parts, strict=True)))
        self._names = names
        self.saved: Any = self._container if saved is None else saved
        # Decides what a step must return: with one object that changes in place, metrics alone
        # suffice; plain pytrees must be returned.
        self.is_changed_in_place = not self.parts or any(map(_can_change, self.parts))
        if not self.is_changed_in_place:
            if saved is not None:
                raise ValueError(
                    "RunFolder(saved=...): the state is plain pytrees, and each step returns new "
                    "ones, so the checkpoint would always contain the initial state. Omit saved to "
                    "save the complete state."
                )
            for name, part in zip(self._names, self.parts, strict=True):
                # Steps and checkpoints return arrays in the place of Python numbers. Without this
                # conversion the second step would compile again, for other types.
                setattr(self._container, name, jax.tree.map(_to_array, part))

    @property
    def parts(self) -> tuple[object, ...]:
        """The current arguments of the step before the batch."""
        # Attributes of the user's `Checkpoint` or `TrainState`, whose names are only known here.
        return tuple(getattr(self._container, name) for name in self._names)

    @property
    def value(self) -> object:
        """The current state, in the form of the argument `state` of `train`."""
        if isinstance(self._state, Container):
            return self._state
        return self.parts if type(self._state) is tuple else self.parts[0]

    def update(self, result: object) -> Mapping[str, SupportsFloat]:
        """Replaces the state if a step has returned a new one; returns the metrics of the step.

        Raises:
            TypeError: If the step returned neither metrics nor a state and metrics, or only metrics
                although the state cannot change in place.
        """
        if isinstance(result, Mapping):
            if not self.is_changed_in_place:
                raise step_results.no_state_error(self._names)
            return result
        if not (type(result) is tuple and len(result) == 2 and isinstance(result[1], Mapping)):
            raise step_results.result_error(result)
        state, metrics = result
        is_single = len(self._names) == 1 and type(self._state) is not tuple
        parts = (state,) if is_single else state
        # `type` and not `isinstance`: a NamedTuple, such as a state of Optax, is one part.
        if type(parts) is not tuple or len(parts) != len(self._names):
            raise step_results.state_error(state, self._names)
        for name, part in zip(self._names, parts, strict=True):
            setattr(self._container, name, part)
        return metrics


def _to_array(leaf: object) -> object:
    return jnp.asarray(leaf) if isinstance(leaf, bool | int | float) else leaf


def _can_change(part: PyTree) -> bool:
    """Returns whether a step can change a part of the state in place."""
    leaves = jax.tree.leaves(part, is_leaf=lambda x: isinstance(x, _OBJECT_TYPES))
    return any(isinstance(x, _OBJECT_TYPES) or not _is_constant(x) for x in leaves)


def _is_constant(leaf: object) -> bool:
    # A function is constant, too: a Flax `TrainState` contains `apply_fn`.
    constants = jax.Array | np.ndarray | np.generic | complex | float | int
    return isinstance(leaf, constants) or callable(leaf)
