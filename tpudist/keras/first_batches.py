"""Reads the first batches of `fit`, by a call of `fit` that stops before its first step.

So these are exactly the batches of the training: after the validation split, weighted by class,
shuffled, placed on the devices, and agreed on by all processes.
"""

import contextlib
import contextvars
import dataclasses
import inspect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from tpudist.input.dataset import DistributedDataset
from tpudist.keras import keras_internals
from tpudist.keras.keras_internals import Batch

if TYPE_CHECKING:
    import keras

VERIFIABLE = ("fit", "train_on_batch")
# Arguments of `fit` that limit a call to its first batches, without effects of callbacks.
_ONLY_FIRST_STEPS = {"epochs": 1, "initial_epoch": 0, "callbacks": None, "validation_data": None}

_reader: "contextvars.ContextVar[FirstBatches | None]" = contextvars.ContextVar(
    "tpudist.first_batches", default=None
)


class _Enough(Exception):
    """Ends a call of `fit` that has read its batches."""


@dataclasses.dataclass
class FirstBatches:
    """The first state and batches of a call of `fit`.

    Attributes:
        model: The model.
        count: Number of batches to read.
        state: Arrays of `keras_internals.state_of`; None if there was no batch.
        batches: The batches on the devices.
        adapter: Keras' source of batches; None for a call with one batch.
    """

    model: "keras.Model"
    count: int
    state: tuple[list[jax.Array], ...] | None = None
    batches: list[Any] = dataclasses.field(default_factory=list)
    adapter: Any = None

    def take(self, state: tuple[list[jax.Array], ...], iterator: Iterator[Batch]) -> NoReturn:
        """Replaces the step that `fit` calls: stores its arguments, and ends the call."""
        for variables, arrays in zip(keras_internals.state_of(self.model), state, strict=True):
            for variable, array in zip(variables, arrays, strict=True):
                keras_internals.set_array(variable, array)  # `fit` has removed them
        self.state, self.batches = state, list(itertools.islice(iterator, self.count))
        raise _Enough


def reader() -> FirstBatches | None:
    """Returns the reader of the current call of `fit`; None if the call trains."""
    return _reader.get()


def find_problem(
    model: "keras.Model", name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Returns the reason why a call cannot be compared with one device; "" if it can."""
    if name not in VERIFIABLE:
        return (
            f"verify received {name} of the Keras model {model.name!r}, but it compares training. "
            f"Pass {' or '.join(VERIFIABLE)}, with its arguments."
        )
    x = args[0] if args else kwargs.get("x")
    if isinstance(x, Iterator) or (isinstance(x, DistributedDataset) and x.has_one_pass):
        return (
            f"{name} of the Keras model {model.name!r} cannot be verified: it received a "
            f"{type(x).__name__} that can be read only once, so its first batches would be missing "
            "in the training. Pass arrays, or a dataset that can be read again; or verify "
            "train_on_batch with a batch."
        )
    return ""


def read(
    model: "keras.Model",
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    count: int,
) -> FirstBatches:
    """Returns the first batches of a call of `fit` or `train_on_batch`, and its first state."""
    method = getattr(model, name)  # a method of Keras
    bound = inspect.signature(method).bind(*args, **kwargs)
    arguments = bound.arguments
    if name == "fit":
        if arguments.get("validation_data") is not None:
            arguments["validation_split"] = 0.0  # as Keras does
        arguments.update(_ONLY_FIRST_STEPS, verbose=0)
    first = FirstBatches(model, count)
    before, token = model.train_function, _reader.set(first)
    try:
        method(*bound.args, **bound.kwargs)
    except _Enough:
        pass
    finally:
        _reader.reset(token)
        model.train_function = before
    return first


@contextlib.contextmanager
def restore_state(model: "keras.Model", x: object) -> Iterator[None]:
    """Restores a model, its data and the random number generators after the `with` block."""
    parts = keras_internals.state_of(model)
    arrays = [(v, keras_internals.array_of(v)) for variables in parts for v in variables]
    attributes = {
        key: vars(model)[key] for key in keras_internals.FIT_ATTRIBUTES if key in vars(model)
    }
    # Keras 3.15 draws the order of arrays with NumPy's global generator, and that of a PyDataset
    # with Python's.
    numpy_state, python_state = np.random.get_state(), random.getstate()
    dataset = x if isinstance(x, DistributedDataset) else None
    next_pass = None if dataset is None else dataset.next_pass
    try:
        yield
    finally:
        for variable, array in arrays:
            keras_internals.set_array(variable, array)
        # Not `setattr`, which Keras overrides.
        values = model.__dict__
        for key in keras_internals.FIT_ATTRIBUTES:
            values.pop(key, None)
        values.update(attributes)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if dataset is not None and next_pass is not None:
            dataset.next_pass = next_pass
