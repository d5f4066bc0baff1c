"""A Keras model's state in a checkpoint, which any strategy restores, and none."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from tpudist.checkpoint.entries import Container


class ModelState(Container):
    """What a Keras model holds, for `tpudist.checkpoint`: weights, seeds and its optimizer's state.

        state = tpudist.checkpoint.Checkpoint(model=model, epoch=0)
        manager = tpudist.checkpoint.CheckpointManager(state, "run/checkpoints")

    A checkpoint takes Keras models, layers, optimizers and metrics as they are, and saves this of a
    model.

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
            raise _not_built(model)
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()  # in a callback, in the middle of an epoch
        weights = list(model.weights)
        known = set(map(id, weights))
        seeds = [v for v in model.variables if id(v) not in known]
        found = {"weights": _Variables(weights), "seeds": _Variables(seeds)}
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            _build(optimizer, model)
            found["optimizer"] = _Variables(optimizer.variables)
        return found


def open_object(x: Any, neighbors: Iterable[Any]) -> Any:
    """Returns what a checkpoint saves of an object of Keras, or None if it saves nothing of it.

    Args:
        x: A model, layer, optimizer, metric, seed generator or variable.
        neighbors: The other objects of the checkpoint. An optimizer that is not built is built for
            the only model among them.

    Raises:
        ValueError: If there is not one such model, or a model is not built.
    """
    import keras

    if keras.backend.backend() != "jax":
        return None
    if isinstance(x, keras.Layer):
        return ModelState(x)
    if isinstance(x, keras.optimizers.Optimizer):
        if not x.built:
            _build(x, _find_model(x, neighbors))
        return _Variables(x.variables)
    if isinstance(x, keras.metrics.Metric):
        return _Variables(x.variables)
    if isinstance(x, keras.random.SeedGenerator):
        return _Variable(x.state)
    return _Variable(x) if isinstance(x, keras.Variable) else None


def _find_model(optimizer: Any, neighbors: Iterable[Any]) -> Any:
    import keras

    models = list({id(x): x for x in neighbors if isinstance(x, keras.Model)}.values())
    own = [x for x in models if getattr(x, "optimizer", None) is optimizer] or models
    if len(own) != 1:
        raise ValueError(
            f"The Keras optimizer {optimizer.name!r} is not built, but a checkpoint needs its "
            f"variables. The checkpoint has {len(models)} models, so call "
            "optimizer.build(model.trainable_variables) first, with the variables that it trains."
        )
    if not own[0].built:
        raise _not_built(own[0])
    return own[0]


def _build(optimizer: Any, model: Any) -> None:
    if optimizer.built:
        return
    from tpudist.keras import distribution_in_force

    with distribution_in_force.enter_of(model):
        optimizer.build(model.trainable_variables)


def _not_built(model: Any) -> ValueError:
    return ValueError(
        f"The Keras model {model.name!r} is not built, but a checkpoint needs its variables. Begin "
        "the model with an Input layer, or call model.build(input_shape) first."
    )


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

    @property
    def checkpoint_identity(self) -> Any:
        """What is saved once, however often it is there."""
        return self._variable

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
