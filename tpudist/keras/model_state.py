"""A Keras model's state in a checkpoint, which any strategy restores, and none."""

from collections.abc import Sequence
from typing import Any

import jax

from tpudist.checkpoint.entries import Container


class ModelState(Container):
    """What a Keras model holds, for `tpudist.checkpoint`: weights, seeds and its optimizer's state.

        state = tpudist.checkpoint.Checkpoint(model=tpudist.keras.ModelState(model), epoch=0)
        manager = tpudist.checkpoint.CheckpointManager(state, "run/checkpoints")

    Values are saved in the order in which the model has them, not by the names that Keras numbers
    anew in each program: a model of the same architecture takes them, under another strategy, split
    otherwise, or out of all scopes. It must be built; an optimizer that is not yet is, on restore
    as on save. What metrics hold is not saved.

    As `model.save_weights`, which writes one file from one process.
    """

    def __init__(self, model: Any):
        """Of `model`, a `keras.Model`."""
        self._model = model

    def checkpoint_objects(self) -> dict[str, Any]:
        """The variables, by kind and place.

        Raises:
            ValueError: The model is not built, so that it has no variables yet.
        """
        model = self._model
        if not model.built:
            raise ValueError(
                f"The Keras model {model.name!r} is not built, and a checkpoint needs its "
                f"variables. Give it an Input layer, or call model.build(input_shape) first."
            )
        model.jax_state_sync()  # in a callback, in the middle of an epoch
        weights = list(model.weights)
        known = set(map(id, weights))
        seeds = [v for v in model.variables if id(v) not in known]
        found = {"weights": _Variables(weights), "seeds": _Variables(seeds)}
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            self._build(optimizer)
            found["optimizer"] = _Variables(optimizer.variables)
        return found

    def _build(self, optimizer: Any) -> None:
        if optimizer.built:
            return
        from tpudist.keras import distribution_in_force

        with distribution_in_force.enter_of(self._model):
            optimizer.build(self._model.trainable_variables)


class _Variables(Container):
    """Variables by their numbers."""

    def __init__(self, variables: Sequence[Any]):
        self._variables = variables

    def checkpoint_objects(self) -> dict[str, Any]:
        return {str(i): _Variable(v) for i, v in enumerate(self._variables)}


class _Variable:
    """One variable, as the entries of checkpoints ask for one."""

    def __init__(self, variable: Any):
        self._variable = variable

    def checkpoint_spec(self) -> tuple[tuple[int, ...], Any, jax.sharding.Sharding | None]:
        """Its shape, dtype and sharding; none of one device, to which nothing is bound."""
        value = self._variable.value
        sharding = (
            value.sharding if isinstance(value.sharding, jax.sharding.NamedSharding) else None
        )
        return tuple(value.shape), value.dtype, sharding

    def checkpoint_value(self) -> Any:
        return self._variable.value

    def restore(self, value: Any) -> None:
        self._variable.assign(value)
