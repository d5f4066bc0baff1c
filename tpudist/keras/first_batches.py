"""The first batches of `fit`, read by a call of `fit` that stops before its first step.

So they are what training would be given: split off for validation, weighted by class, shuffled,
placed on the devices, and agreed on by all processes.
"""

import contextlib
import contextvars
import dataclasses
import inspect
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tpudist.input.dataset import DistributedDataset
from tpudist.keras import keras_internals

TRAINING = ("fit", "train_on_batch")
_NO_EFFECT = {"epochs": 1, "initial_epoch": 0, "callbacks": None, "validation_data": None}
# What a call of `fit` leaves in a model, beside its variables.
_ATTRIBUTES = ("history", "stop_training", "_jax_state", "_jax_state_synced", "_initial_epoch")

_reader: "contextvars.ContextVar[FirstBatches | None]" = contextvars.ContextVar(
    "tpudist.first_batches", default=None
)


class _Enough(Exception):
    """Ends a call of `fit` that has read its batches."""


@dataclasses.dataclass
class FirstBatches:
    """What `fit` begins with.

    Attributes:
        model: The model.
        count: How many batches to read.
        state: The arrays of the trainable and the other variables, the optimizer's and the
            metrics'; None if there was no batch.
        batches: The batches, as they are on the devices.
        adapter: What Keras asks for batches; None if it was given one.
    """

    model: Any
    count: int
    state: tuple[list[Any], ...] | None = None
    batches: list[Any] = dataclasses.field(default_factory=list)
    adapter: Any = None

    def take(self, state: tuple[list[Any], ...], iterator: Iterator[Any]) -> Any:
        """Stands for the step that `fit` calls."""
        for variables, arrays in zip(keras_internals.state_of(self.model), state, strict=True):
            for variable, array in zip(variables, arrays, strict=True):
                keras_internals.set_array(variable, array)  # `fit` has taken them away
        self.state, self.batches = state, list(itertools.islice(iterator, self.count))
        raise _Enough


def reader() -> FirstBatches | None:
    """Who reads the batches of the `fit` that is under way; None if it trains."""
    return _reader.get()


def find_problem(model: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns why a call cannot be compared with one device, and what can; "" if it can."""
    if name not in TRAINING:
        return (
            f"verify received {name} of the Keras model {model.name!r}, but it compares training. "
            f"Pass {' or '.join(TRAINING)}, with its arguments."
        )
    x = args[0] if args else kwargs.get("x")
    if hasattr(type(x), "__next__") or (isinstance(x, DistributedDataset) and x.has_one_pass):
        return (
            f"{name} of the Keras model {model.name!r} cannot be verified: it received a "
            f"{type(x).__name__} that can be read only once, so its first batches would be missing "
            "in the training. Pass arrays, or a dataset that can be read again; or verify "
            "train_on_batch with a batch."
        )
    return ""


def read(
    model: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int
) -> FirstBatches:
    """Returns the first batches of a call of `fit` or `train_on_batch`, and its first state."""
    method = getattr(model, name)
    bound = inspect.signature(method).bind(*args, **kwargs)
    given = bound.arguments
    if name == "fit":
        if given.get("validation_data") is not None:
            given["validation_split"] = 0.0  # as Keras does
        given.update(_NO_EFFECT, verbose=0)
    found = FirstBatches(model, count)
    before, token = model.train_function, _reader.set(found)
    try:
        method(*bound.args, **bound.kwargs)
    except _Enough:
        pass
    finally:
        _reader.reset(token)
        model.train_function = before
    return found


@contextlib.contextmanager
def keep_state(model: Any, x: Any) -> Iterator[None]:
    """Leaves a model, its data and random numbers as they are, whatever the `with` block does."""
    parts = keras_internals.state_of(model)
    arrays = [(v, keras_internals.array_of(v)) for variables in parts for v in variables]
    attributes = {key: vars(model)[key] for key in _ATTRIBUTES if key in vars(model)}
    numpy_state, python_state = np.random.get_state(), random.getstate()
    next_pass = x.next_pass if isinstance(x, DistributedDataset) else None
    try:
        yield
    finally:
        for variable, array in arrays:
            keras_internals.set_array(variable, array)
        for key in _ATTRIBUTES:
            vars(model).pop(key, None)
        vars(model).update(attributes)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if next_pass is not None:
            x.next_pass = next_pass
