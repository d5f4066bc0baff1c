"""`fit`, `evaluate` and `predict` of a distributed dataset: its elements as batches of Keras."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tpudist.input.dataset import DistributedDataset
from tpudist.input.iterator import DistributedIterator
from tpudist.input.sources.no_batches import NoBatches
from tpudist.keras import keras_internals, uneven_rows
from tpudist.keras.mesh_distribution import MeshDistribution
from tpudist.values.per_replica import PerReplica

# What the elements hold already, or have no use for.
_REFUSED = {
    "y": "the targets are part of its elements: (x, y)",
    "sample_weight": "weights are part of its elements: (x, y, sample_weight)",
    "class_weight": (
        "put the weights of the classes into the third part of its elements, the sample weights"
    ),
    "batch_size": "it is already batched",
    "validation_split": "give validation_data",
}


class DistributedAdapter(keras_internals.data_adapter_class()):
    """What Keras asks of data, answered by a `DistributedDataset`: one pass for each epoch."""

    def __init__(self, dataset: DistributedDataset, distribution: MeshDistribution):
        """Of `dataset`, whose replicas are those of `distribution`."""
        self._dataset, self._distribution = dataset, distribution

    def get_jax_iterator(self) -> Iterator[Any]:
        """The elements of the next pass, which are on the devices, and were made ahead."""
        for element in self._dataset:
            yield _rows_of(element, self._distribution)

    @property
    def num_batches(self) -> int | None:
        """The number of elements of a pass; None if it has no end, or it is not known."""
        cardinality = self._dataset.cardinality
        return cardinality if cardinality >= 0 else None

    @property
    def batch_size(self) -> int | None:
        """Not known before an element is read."""
        return None

    @property
    def has_partial_batch(self) -> bool | None:
        """Not known either."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """Nor this."""
        return None


def adapt(
    plain: Callable[..., Any],
    model: Any,
    distribution: MeshDistribution,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of `fit` and the others, with distributed datasets as Keras takes them.

    Raises:
        TypeError: A distributed dataset where there can be none, or an iterator of one.
        ValueError: It belongs to another strategy, or is given with what it holds itself.
        NoBatches: If `x` has no batches; Keras' loops would fail without a clear error.
    """
    given = (*args, *kwargs.values())
    if not any(isinstance(x, DistributedDataset | DistributedIterator) for x in given):
        return args, kwargs
    bound = inspect.signature(plain).bind(model, *args, **kwargs)
    arguments = bound.arguments
    name = plain.__name__
    for key, value in arguments.items():
        if isinstance(value, DistributedIterator):
            raise TypeError(
                f"{name} received an iterator of a distributed dataset as {key}, which allows only "
                "one pass. Pass the dataset itself: each epoch is a pass through it."
            )
        if isinstance(value, DistributedDataset):
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
    if isinstance(arguments.get("x"), DistributedDataset):
        for key, why in _REFUSED.items():
            if arguments.get(key) is not None and not (
                key == "validation_split" and not arguments[key]
            ):
                raise ValueError(f"{name} received a distributed dataset, and {key}: {why}.")
        if arguments.get("shuffle"):
            warnings.warn(
                f"{name} received a distributed dataset and shuffle=True, which has no effect: "
                "shuffle the dataset before you distribute it.",
                stacklevel=4,
            )
        if arguments["x"].cardinality == 0:
            raise NoBatches
        spec = arguments["x"].element_spec
        if name != "predict":
            # By its spec: Keras would read a first element for it, which is a pass of its own.
            keras_internals.build(model, _rows_of(spec, distribution))
    for key, value in arguments.items():
        if isinstance(value, DistributedDataset):
            arguments[key] = DistributedAdapter(value, distribution)
    return bound.args[1:], bound.kwargs


def result_of_no_batches(
    plain: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What `fit`, `evaluate` or `predict` returns after 0 steps; warns that there are no batches.

    It is a history without epochs, metrics that were just reset, or outputs without rows.
    """
    import keras

    arguments = inspect.signature(plain).bind(model, *args, **kwargs).arguments
    name = plain.__name__
    for _ in arguments["x"]:
        raise AssertionError("the dataset has batches")
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
        outputs = getattr(model, "outputs", None)
        if outputs is None:
            raise NoBatches
        rows = [np.zeros((0, *x.shape[1:]), x.dtype) for x in jax.tree.leaves(outputs)]
        return rows[0] if len(rows) == 1 else rows
    model.reset_metrics()
    try:
        found = model.get_metrics_result()
    except ValueError:  # nobody knows what the metrics would measure
        return {"loss": 0.0} if arguments.get("return_dict") else 0.0
    return found if arguments.get("return_dict") else model._flatten_metrics_in_order(found)


def _rows_of(element: Any, distribution: MeshDistribution) -> Any:
    return jax.tree.map(
        lambda x: uneven_rows.of_replicas(x, distribution),
        element,
        is_leaf=lambda x: isinstance(x, PerReplica),
    )
