"""Passes the elements of a distributed dataset to `fit`, `evaluate` and `predict` as batches."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from tpudist.input.dataset import DistributedDataset
from tpudist.input.iterator import DistributedIterator
from tpudist.input.sources.no_batches import NoBatches
from tpudist.keras import keras_internals, uneven_rows
from tpudist.keras.keras_internals import Batch
from tpudist.keras.mesh_distribution import MeshDistribution
from tpudist.values.per_replica import PerReplica

# The arguments that cannot be combined with a distributed dataset, and the reasons.
_CONFLICTS = {
    "y": "the targets are part of its elements: (x, y)",
    "sample_weight": "weights are part of its elements: (x, y, sample_weight)",
    "class_weight": (
        "put the weights of the classes into the third part of its elements, the sample weights"
    ),
    "batch_size": "it is already batched",
    "validation_split": "give validation_data",
}


class DistributedAdapter(keras_internals.data_adapter_class()):
    """Keras' source of batches for a `DistributedDataset`: one pass for each epoch.

    Args:
        dataset: The dataset.
        distribution: Distribution of the strategy that distributed it.
    """

    def __init__(self, dataset: DistributedDataset, distribution: MeshDistribution):
        self._dataset, self._distribution = dataset, distribution

    def get_jax_iterator(self) -> Iterator[Batch]:
        """Yields the elements of the next pass, which are on the devices already."""
        for element in self._dataset:
            yield _as_rows(element, self._distribution)

    @property
    def num_batches(self) -> int | None:
        """Number of elements of a pass; None if it is infinite or unknown."""
        cardinality = self._dataset.cardinality
        return cardinality if cardinality >= 0 else None

    @property
    def batch_size(self) -> int | None:
        """Always None: the size is unknown until an element is read."""
        return None

    @property
    def has_partial_batch(self) -> bool | None:
        """Always None: unknown until the end of a pass."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """Always None: unknown until the end of a pass."""
        return None


def adapt(
    plain: Callable[..., Any],
    model: keras.Model,
    distribution: MeshDistribution,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns the arguments of `fit` and similar methods, with adapters for distributed datasets.

    Raises:
        TypeError: If a distributed dataset is in a wrong place, or there is an iterator of one.
        ValueError: If it belongs to another strategy, or another argument conflicts with it.
        NoBatches: If `x` has no batches; Keras' loops would fail without a clear error.
    """
    # Nothing is looked up in the usual case, without a distributed dataset.
    if not any(
        isinstance(x, DistributedDataset | DistributedIterator) for x in (*args, *kwargs.values())
    ):
        return args, kwargs
    bound = inspect.signature(plain).bind(model, *args, **kwargs)
    arguments = bound.arguments
    name = plain.__name__
    for key, value in arguments.items():
        _check_place(name, key, value, distribution)
    x = arguments.get("x")
    if isinstance(x, DistributedDataset):
        _check_conflicts(name, arguments)
        if x.cardinality == 0:
            raise NoBatches
        if name != "predict":
            # From the spec: otherwise Keras would read an element, which costs a pass.
            keras_internals.build(model, _as_rows(x.element_spec, distribution))
    for key, value in arguments.items():
        if isinstance(value, DistributedDataset):
            arguments[key] = DistributedAdapter(value, distribution)
    return bound.args[1:], bound.kwargs


def _check_place(name: str, key: str, value: object, distribution: MeshDistribution) -> None:
    if isinstance(value, DistributedIterator):
        raise TypeError(
            f"{name} received an iterator of a distributed dataset as {key}, which allows only "
            "one pass. Pass the dataset itself: each epoch is a pass through it."
        )
    if not isinstance(value, DistributedDataset):
        return
    if key not in ("x", "validation_data") or name.endswith("on_batch"):
        raise TypeError(
            f"{name} received a distributed dataset as {key}. Pass it only as x of fit, "
            "evaluate and predict, or as validation_data of fit."
        )
    if value.strategy is not distribution.strategy:
        raise ValueError(
            f"{name} of a model of {distribution.strategy!r} received a dataset that "
            f"{value.strategy!r} distributed, as {key}. Distribute it by the strategy of "
            "the model."
        )


def _check_conflicts(name: str, arguments: Mapping[str, Any]) -> None:
    for key, why in _CONFLICTS.items():
        value = arguments.get(key)
        # Keras' default of `validation_split` is 0.0, not None.
        if value is not None and (key != "validation_split" or value):
            raise ValueError(f"{name} received a distributed dataset, and {key}: {why}.")
    if arguments.get("shuffle"):
        warnings.warn(
            f"{name} received a distributed dataset and shuffle=True, which has no effect: "
            "shuffle the dataset before you distribute it.",
            stacklevel=5,
        )


def result_of_no_batches(
    plain: Callable[..., Any],
    model: keras.Model,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Returns the result of `fit`, `evaluate` or `predict` after 0 steps, and warns about it.

    It is a history without epochs, metrics after a reset, or outputs without rows.
    """
    arguments = inspect.signature(plain).bind(model, *args, **kwargs).arguments
    name = plain.__name__
    _run_empty_pass(arguments["x"])
    if name == "fit":
        if arguments.get("validation_data") is not None:
            warnings.warn(
                "fit received x without batches, and validation_data. Validation runs at the end "
                "of each epoch, and there was no epoch, so validation_data was not evaluated. Call "
                "model.evaluate, or pass x with batches.",
                stacklevel=4,
            )
        history = keras.callbacks.History()
        history.set_model(model)
        history.on_train_begin()
        return history
    if name == "predict":
        outputs = getattr(model, "outputs", None)  # only a functional model of Keras has them
        if outputs is None:
            raise NoBatches
        rows = [np.zeros((0, *x.shape[1:]), x.dtype) for x in jax.tree.leaves(outputs)]
        return rows[0] if len(rows) == 1 else rows
    model.reset_metrics()
    try:
        metrics = model.get_metrics_result()
    except ValueError:  # the metrics are not built
        return {"loss": 0.0} if arguments.get("return_dict") else 0.0
    return (
        metrics if arguments.get("return_dict") else keras_internals.flatten_metrics(model, metrics)
    )


def _run_empty_pass(dataset: DistributedDataset) -> None:
    # The pass is empty, but it begins and ends, as in a call with batches.
    for _ in dataset:
        raise AssertionError("the dataset has batches")


def _as_rows(element: Batch, distribution: MeshDistribution) -> Batch:
    return jax.tree.map(
        lambda x: uneven_rows.of_replicas(x, distribution),
        element,
        is_leaf=lambda x: isinstance(x, PerReplica),
    )
