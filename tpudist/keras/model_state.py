"""The state of a Keras model in a checkpoint, which can be restored with or without a strategy."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.typing import ArrayLike

from tpudist.checkpoint.holders import Container
from tpudist.keras import keras_internals

if TYPE_CHECKING:
    import keras


class ModelState(Container):
    """State of a Keras model for `tpudist.checkpoint`: weights, seeds and the optimizer's state.

        state = tpudist.checkpoint.Checkpoint(model=model, epoch=0)
        manager = tpudist.checkpoint.CheckpointManager(state, "run/checkpoints")

    You can pass Keras models, layers, optimizers and metrics to a checkpoint directly; for a model,
    it saves this state.

    Values are saved in the order of the model's variables, not by their names, whose numbers Keras
    assigns in each program. So a model of the same architecture can restore them under another
    strategy, with another split, or outside of all scopes. The model must be built. Its optimizer
    is built if necessary, when saving and when restoring. The state of metrics is not saved.

    Matches `model.save_weights`, which writes one file from one process.

    Args:
        model: The model.
    """

    def __init__(self, model: "keras.Layer"):
        self._model = model

    def checkpoint_objects(self) -> dict[str, Any]:
        """Returns the variables, by kind and number.

        Raises:
            ValueError: If the model is not built, so that it has no variables yet.
        """
        model = self._model
        if not model.built:
            raise _not_built(model)
        if isinstance(model, keras_internals.trainer_class()):
            # In the middle of an epoch, in a callback, the variables have old values until this
            # call.
            model.jax_state_sync()
        weights = list(model.weights)
        known = set(map(id, weights))
        seeds = [v for v in model.variables if id(v) not in known]
        state = {"weights": _Variables(weights), "seeds": _Variables(seeds)}
        optimizer = keras_internals.optimizer_of(model)
        if optimizer is not None:
            _build(optimizer, model)
            state["optimizer"] = _Variables(optimizer.variables)
        return state


def open_object(x: object, neighbors: Iterable[object]) -> Any:
    """Returns the part of a Keras object that a checkpoint saves; None if there is none.

    Args:
        x: Model, layer, optimizer, metric, seed generator or variable.
        neighbors: Other objects of the checkpoint. An optimizer that is not built yet is built for
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


def _find_model(
    optimizer: "keras.optimizers.Optimizer", neighbors: Iterable[object]
) -> "keras.Model":
    import keras

    models = list({id(x): x for x in neighbors if isinstance(x, keras.Model)}.values())
    own = [x for x in models if keras_internals.optimizer_of(x) is optimizer] or models
    if len(own) != 1:
        raise ValueError(
            f"The Keras optimizer {optimizer.name!r} is not built, but a checkpoint needs its "
            f"variables. The checkpoint has {len(models)} models, so call "
            "optimizer.build(model.trainable_variables) first, with the variables that it trains."
        )
    if not own[0].built:
        raise _not_built(own[0])
    return own[0]


def _build(optimizer: "keras.optimizers.Optimizer", model: Any) -> None:
    if optimizer.built:
        return
    from tpudist.keras import current_distribution

    with current_distribution.enter_scope_of(model):
        optimizer.build(model.trainable_variables)


def _not_built(model: "keras.Layer") -> ValueError:
    return ValueError(
        f"The Keras model {model.name!r} is not built, but a checkpoint needs its variables. Begin "
        "the model with an Input layer, or call model.build(input_shape) first."
    )


class _Variables(Container):
    """Variables by their numbers in a sequence."""

    def __init__(self, variables: Sequence["keras.Variable"]):
        self._variables = variables

    def checkpoint_objects(self) -> dict[str, Any]:
        return {str(i): _Variable(v) for i, v in enumerate(self._variables)}


class _Variable:
    """One variable, with the interface of `checkpoint.entries`."""

    def __init__(self, variable: "keras.Variable"):
        self._variable = variable

    @property
    def checkpoint_identity(self) -> Any:
        """The object that a checkpoint saves once, even if it contains it several times."""
        return self._variable

    def checkpoint_spec(self) -> tuple[tuple[int, ...], Any, jax.sharding.Sharding | None]:
        """Returns the shape, dtype and sharding; None as the sharding of an array on one device."""
        value = self._variable.value
        sharding = (
            value.sharding if isinstance(value.sharding, jax.sharding.NamedSharding) else None
        )
        return tuple(value.shape), value.dtype, sharding

    def checkpoint_value(self) -> Any:
        return self._variable.value

    def restore(self, value: ArrayLike) -> None:
        self._variable.assign(value)
