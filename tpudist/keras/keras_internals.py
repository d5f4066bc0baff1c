"""All access to private names of Keras, and the check that they are as we know them.

Keras has no public way to decide how a batch is placed on devices, or to change the program around
a step. So `trainer_hooks` and other modules replace methods of Keras, which behave as before
outside of strategies. Nothing here imports Keras before it is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

if TYPE_CHECKING:
    import keras

# A batch as Keras passes it: nested tuples, lists and dicts of arrays.
Batch: TypeAlias = Any
# The arrays of the variables of `state_of`, on devices or in host memory.
State: TypeAlias = tuple[list[Any], ...]

_TRAINER = "keras.src.backend.jax.trainer"
_CORE = "keras.src.backend.jax.core"
_OPTIMIZERS = "keras.src.optimizers."
_APPLY = ("self", "grads", "trainable_variables")
# Every function of Keras that tpudist replaces, or calls in private, with its parameters. A Keras
# with other parameters is not supported: `keras_support` reports the differences.
_KNOWN = (
    (_TRAINER, "_distribute_data", ("data", "layouts")),
    (_TRAINER, "JAXEpochIterator._get_distributed_iterator", ("self", "distribution")),
    (_TRAINER, "JAXTrainer._make_function", ("self", "step_function", "concatenate_outputs")),
    (_TRAINER, "JAXTrainer._symbolic_build", ("self", "iterator", "data_batch")),
    (_TRAINER, "JAXTrainer._flatten_metrics_in_order", ("self", "logs")),
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


# The attributes that a call of `fit` sets in a model, in addition to its variables.
FIT_ATTRIBUTES = ("history", "stop_training", "_jax_state", "_jax_state_synced", "_initial_epoch")


def list_changes() -> list[str]:
    """Returns the differences between this Keras and the known ones; needs the backend jax."""
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


def replace_method(
    owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replaces a method of a class of Keras.

    Args:
        owner: Class of Keras.
        name: Name of the method.
        wrap: Called with the plain method; returns the new one.
    """
    plain = getattr(owner, name)  # a method of Keras
    setattr(owner, name, functools.wraps(plain)(wrap(plain)))


def is_nnx_enabled() -> bool:
    """Returns whether Keras uses variables of Flax NNX, which it decides during its import."""
    return importlib.import_module("keras.src.backend.config").is_nnx_enabled()


def trainer_class() -> Any:
    """Returns the base class of all models, which has the loops of `fit` and related methods."""
    return importlib.import_module(_TRAINER).JAXTrainer


def base_trainer_class() -> Any:
    """Returns the base class of `trainer_class`, which has `compile`."""
    return importlib.import_module(_TRAINER).base_trainer.Trainer


def wrap_placement(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the function that places a batch on the devices, `place(batch, layouts=None)`."""
    # Keras' loops call it by its name in this module, so replacing the attribute is enough.
    module: Any = importlib.import_module(_TRAINER)
    module._distribute_data = wrap(module._distribute_data)


def wrap_batches(choose: Callable[[Any, Any], Iterator[Any] | None]) -> None:
    """Replaces the batches of an epoch, under any distribution.

    Args:
        choose: Called with the distribution and the data adapter; returns the batches on the
            devices, or None to let Keras place them.
    """

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def get_distributed_iterator(self, distribution):
            batches = choose(distribution, self.data_adapter)
            return plain(self, distribution) if batches is None else batches

        return get_distributed_iterator

    iterator_class = importlib.import_module(_TRAINER).JAXEpochIterator
    replace_method(iterator_class, "_get_distributed_iterator", wrap)


def call_on_creation(act: Callable[[], object]) -> None:
    """Registers a function that is called before a new variable gets its first value."""

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_layout(self):
            act()
            return plain(self)

        return initialize_layout

    replace_method(importlib.import_module(_CORE).JaxVariable, "_initialize_layout", wrap)


def wrap_creation(enter: Callable[[keras.Variable], contextlib.AbstractContextManager]) -> None:
    """Registers a context in which variables are created and their initializers run.

    Args:
        enter: Called with the variable; returns the context manager.
    """

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(self, *args, **kwargs):
            with enter(self):
                return plain(self, *args, **kwargs)

        return method

    # Keras 3.15 runs the initializer in `__init__`. For a variable that is created in a stateless
    # scope, it defers the initializer, and calls the second method later.
    for name in ("__init__", "_initialize_with_initializer"):
        replace_method(importlib.import_module(_CORE).JaxVariable, name, wrap)


def array_of(variable: keras.Variable) -> Any:
    """Returns the array of a variable, ignoring any stateless scope; None if it has none."""
    return getattr(variable, "_value", None)  # Keras sets it in the course of `__init__`


def set_array(variable: keras.Variable, value: object) -> None:
    """Makes an array the value of a variable, without a copy."""
    variable._value = value


def is_in_stateless_scope() -> bool:
    """Returns whether a `keras.StatelessScope` is active."""
    return _stateless_scope() is not None


def has_stateless_value(variable: keras.Variable) -> bool:
    """Returns whether the active `keras.StatelessScope` has a value of a variable."""
    scope = _stateless_scope()
    return scope is not None and scope.get_current_value(variable) is not None


def _stateless_scope() -> Any:
    name = "keras.src.backend.common.stateless_scope"
    return importlib.import_module(name).get_stateless_scope()


def data_adapter_class() -> Any:
    """Returns the base class of the sources of batches that Keras uses without conversion."""
    return importlib.import_module("keras.src.trainers.data_adapters.data_adapter").DataAdapter


def build(model: keras.Model, batch: object) -> None:
    """Builds a compiled model from the shapes and dtypes of a batch."""
    model._symbolic_build(data_batch=batch)


def flatten_metrics(model: keras.Model, metrics: dict[str, Any]) -> Any:
    """Returns metrics in the form in which `evaluate` returns them: a number, or a list."""
    return model._flatten_metrics_in_order(metrics)


def random_seed() -> int | None:
    """Returns the seed that the program has set for Keras; None if it has not."""
    return importlib.import_module("keras.src.utils.rng_utils").get_random_seed()


def is_of_arrays(adapter: object) -> bool:
    """Returns whether a data adapter slices arrays, in an order that NumPy draws."""
    # By name: the class has no public path, and an import of its private module would fail if Keras
    # moves it. An unknown class only costs a comparison of every batch.
    return type(adapter).__name__ == "ArrayDataAdapter"


def initial_epoch(model: keras.Model) -> int:
    """Returns the epoch at which `fit` begins, which a callback may have set; else 0."""
    return getattr(model, "_initial_epoch", None) or 0  # Keras sets it only in `fit`


def layout_of(variable: keras.Variable) -> Any:
    """Returns a variable's requested layout: a TensorLayout or a sharding of JAX, or None."""
    return getattr(variable, "_layout", None)  # Keras sets it in the course of `__init__`


def optimizer_of(model: keras.Layer) -> Any:
    """Returns the optimizer of a model; None for a layer, or a model that is not compiled."""
    return getattr(model, "optimizer", None)  # only `keras.Model` has it


def state_of(model: keras.Model) -> tuple[list[Any], ...]:
    """Returns the variables in the order of a step's state.

    Returns:
        The trainable variables, the other variables, the optimizer's, and the metrics'.
    """
    optimizer = optimizer_of(model)
    return (
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        [] if optimizer is None else list(optimizer.variables),
        list(model.metrics_variables),
    )


def state_shardings(model: keras.Model) -> tuple[list[jax.sharding.Sharding], ...]:
    """Returns the shardings of `state_of`.

    Keras' own method warns of values whose sharding names no mesh. On one device that is normal:
    Keras itself leaves them so when it loads weights.
    """
    return tuple([variable.value.sharding for variable in part] for part in state_of(model))


def loop_over(
    model: keras.Model, step: Callable[..., Any], *, concatenate: bool
) -> Callable[..., Any]:
    """Returns the function of `fit` that runs `steps_per_execution` steps on an iterator.

    Args:
        model: Model of the step.
        step: Called with a state and a batch.
        concatenate: Whether to concatenate the outputs of the steps.
    """
    return model._make_function(step, concatenate_outputs=concatenate)
