"""What has no public door in Keras, and whether it is still as it is known here.

Keras has no place to say how a batch is placed on devices, or what is compiled around a step. Each
of these is Keras' own again where no strategy is in force. All private names are in this file.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

_TRAINER = "keras.src.backend.jax.trainer"
_CORE = "keras.src.backend.jax.core"
_OPTIMIZERS = "keras.src.optimizers."
_APPLY = ("self", "grads", "trainable_variables")
# Everything that is replaced or called here, and beside it in public, with its parameters.
_KNOWN = (
    (_TRAINER, "_distribute_data", ("data", "layouts")),
    (_TRAINER, "JAXEpochIterator._get_distributed_iterator", ("self", "distribution")),
    (_TRAINER, "JAXTrainer._make_function", ("self", "step_function", "concatenate_outputs")),
    (_TRAINER, "JAXTrainer._symbolic_build", ("self", "iterator", "data_batch")),
    (_TRAINER, "JAXTrainer.make_train_function", ("self", "force")),
    (_TRAINER, "JAXTrainer.make_test_function", ("self", "force")),
    (_TRAINER, "JAXTrainer.make_predict_function", ("self", "force")),
    (_CORE, "JaxVariable._initialize_layout", ("self",)),
    (_CORE, "JaxVariable._initialize_with_initializer", ("self", "initializer")),
    ("keras.src.backend.common.stateless_scope", "get_stateless_scope", ()),
    (_OPTIMIZERS + "base_optimizer", "BaseOptimizer.apply", _APPLY),
    (_OPTIMIZERS + "loss_scale_optimizer", "LossScaleOptimizer.apply", _APPLY),
    ("keras.src.losses.loss", "Loss.__call__", ("self", "y_true", "y_pred", "sample_weight")),
)


def list_changes() -> list[str]:
    """How this Keras differs from the ones that are known; needs the backend jax."""
    return [text for text in map(_compare, _KNOWN) if text]


def _compare(expected: tuple[str, str, tuple[str, ...]]) -> str | None:
    module, name, parameters = expected
    try:
        value: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return f"there is no {module}.{name}"
    found = tuple(inspect.signature(value).parameters)
    if found == parameters:
        return None
    return f"{module}.{name} has the parameters {found}, not {parameters}"


def is_nnx_enabled() -> bool:
    """Whether Keras' variables are those of Flax NNX, which it decides when it is imported."""
    return importlib.import_module("keras.src.backend.config").is_nnx_enabled()


def trainer_class() -> Any:
    """The class of which all models are, with the loops of `fit` and the others."""
    return importlib.import_module(_TRAINER).JAXTrainer


def base_trainer_class() -> Any:
    """The one below it, with `compile`."""
    return importlib.import_module(_TRAINER).base_trainer.Trainer


def wrap_placement(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces what puts a batch on the devices, `place(batch, layouts=None)`."""
    module: Any = importlib.import_module(_TRAINER)
    module._distribute_data = wrap(module._distribute_data)


def wrap_batches(choose: Callable[[Any, Iterator[Any]], Iterator[Any] | None]) -> None:
    """Replaces the batches of an epoch, under any distribution.

    `choose` is given the distribution and the batches on the host, and gives those on the devices;
    None for as Keras does it.
    """
    iterator: Any = importlib.import_module(_TRAINER).JAXEpochIterator
    plain = iterator._get_distributed_iterator

    def _get_distributed_iterator(self, distribution):
        chosen = choose(distribution, self.data_adapter)
        return plain(self, distribution) if chosen is None else chosen

    iterator._get_distributed_iterator = _get_distributed_iterator


def call_on_creation(act: Callable[[Any], Any]) -> None:
    """Has `act` called with each variable that is made, before it has its first value."""
    variable: Any = importlib.import_module(_CORE).JaxVariable
    plain = variable._initialize_layout

    def _initialize_layout(self):
        act(self)
        return plain(self)

    variable._initialize_layout = _initialize_layout


def wrap_creation(enter: Callable[[Any], contextlib.AbstractContextManager]) -> None:
    """Has variables made, and given the first value that an initializer computes, in a context.

    Args:
        enter: Gives it, for a variable.
    """
    variable: Any = importlib.import_module(_CORE).JaxVariable
    for name in ("__init__", "_initialize_with_initializer"):
        _wrap_in_context(variable, name, enter)


def _wrap_in_context(kind: Any, name: str, enter: Callable[[Any], Any]) -> None:
    plain = getattr(kind, name)

    @functools.wraps(plain)
    def method(self, *args, **kwargs):
        with enter(self):
            return plain(self, *args, **kwargs)

    setattr(kind, name, method)


def array_of(variable: Any) -> Any:
    """What a variable holds, whatever scope this is in; None if nothing."""
    return getattr(variable, "_value", None)


def set_array(variable: Any, value: Any) -> None:
    """Has a variable hold an array, where that lies."""
    variable._value = value


def is_in_stateless_scope(variable: Any = None) -> bool:
    """Whether values are those of a `keras.StatelessScope`; of a variable, whether it has one."""
    name = "keras.src.backend.common.stateless_scope"
    scope = importlib.import_module(name).get_stateless_scope()
    if variable is None or scope is None:
        return scope is not None
    return scope.get_current_value(variable) is not None


def data_adapter_class() -> Any:
    """What a source of batches is a subclass of, which Keras then takes as it is."""
    return importlib.import_module("keras.src.trainers.data_adapters.data_adapter").DataAdapter


def build(model: Any, batch: Any) -> None:
    """Builds a model that was compiled, from the shapes and dtypes of a batch."""
    model._symbolic_build(data_batch=batch)


def random_seed() -> int | None:
    """The seed that the program has set for Keras; None if it has not."""
    return importlib.import_module("keras.src.utils.rng_utils").get_random_seed()


def is_of_arrays(adapter: Any) -> bool:
    """Whether a source of batches slices arrays, by numbers that NumPy draws."""
    return type(adapter).__name__ == "ArrayDataAdapter"


def initial_epoch(model: Any) -> int:
    """The epoch at which `fit` begins, if a callback has said so; else 0."""
    return getattr(model, "_initial_epoch", None) or 0


def layout_of(variable: Any) -> Any:
    """Where a variable was said to live: a TensorLayout or a sharding of JAX; None if nowhere."""
    return getattr(variable, "_layout", None)


def state_of(model: Any) -> tuple[list[Any], ...]:
    """Trainable and other variables, the optimizer's and the metrics', as steps are given them."""
    optimizer = getattr(model, "optimizer", None)
    return (
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        [] if optimizer is None else list(optimizer.variables),
        list(model.metrics_variables),
    )


def state_shardings(model: Any) -> tuple[Any, ...]:
    """Of trainable and other variables, the optimizer's and the metrics'.

    Keras' own method warns of values whose sharding names no mesh. On one device that is nothing:
    it leaves them so when it loads weights.
    """
    return tuple([variable.value.sharding for variable in part] for part in state_of(model))


def loop_over(model: Any, step: Callable[..., Any], *, join: bool) -> Callable[..., Any]:
    """What `fit` calls with a state and an iterator: as many steps as one execution has.

    `join` concatenates what the steps return.
    """
    return model._make_function(step, concatenate_outputs=join)
