"""Hugging Face datasets: examples read by number, many at a time, or batches one after another."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tpudist.input.sources import iterable
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.sources.records import RandomTransform, RecordDataset

PyTree = Any


def examples(
    dataset: Any,
    transform: Callable[[Any], PyTree] | None = None,
    *,
    random_transform: RandomTransform | None = None,
    num_threads: int | None = None,
) -> IndexedDataset:
    """The examples of a `datasets.Dataset`; see `from_records`.

    Raises:
        TypeError: They cannot be read by number, or hold no numbers.
    """
    if isinstance(dataset, dict):  # such as a DatasetDict
        raise TypeError(_SEVERAL.format(type(dataset).__name__, ", ".join(map(repr, dataset))))
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"A Hugging Face {type(dataset).__name__} has no examples that can be read by number. "
            f"Load it without streaming, or distribute dataset.batch(global_batch_size)."
        )
    return HuggingFaceDataset(
        _with_numpy_format(dataset),
        transform,
        random_transform=random_transform,
        num_threads=num_threads,
    )


def batches(dataset: Any) -> "HuggingFaceBatches":
    """The source of batches that a `Dataset` or `IterableDataset` is whose rows are batches.

    Raises:
        TypeError: They are single examples.
    """
    if isinstance(dataset, dict):
        raise TypeError(_SEVERAL.format(type(dataset).__name__, ", ".join(map(repr, dataset))))
    features = getattr(dataset, "features", None) or {}
    single = [name for name, kind in features.items() if type(kind).__name__ in _SINGLE]
    if single:
        kind = type(dataset).__name__
        by_number = (
            "tpudist.input.from_records(dataset).batch(global_batch_size), which reads each "
            "example once, or "
            if hasattr(dataset, "__len__")
            else ""
        )
        raise TypeError(
            f"The Hugging Face {kind} is not batched: its {', '.join(map(repr, single))} holds one "
            f"value for each row. Distribute {by_number}dataset.batch(global_batch_size)."
        )
    return HuggingFaceBatches(_with_numpy_format(dataset))


_SEVERAL = "A Hugging Face {} is several datasets: {}. Give one of them."
_SINGLE = ("Value", "ClassLabel", "Image", "Audio")


class HuggingFaceDataset(RecordDataset):
    """Examples of a `datasets.Dataset`; without a transform, columns are read as arrays."""

    def _fetch(self, numbers: list[int]) -> Sequence[Any]:
        if len(numbers) == 1:
            return [self._source[numbers[0]]]
        columns = self._source[numbers]
        return [{name: column[i] for name, column in columns.items()} for i in range(len(numbers))]

    def _read(self, rows: np.ndarray, epoch: int) -> list[np.ndarray]:
        if not self._is_transformed:
            columns = self._source[np.asarray(rows).reshape(-1).tolist()]
            leaves, treedef = jax.tree_util.tree_flatten(columns)
            if treedef == self._treedef and self._match_specs(leaves):
                return [x.reshape(np.shape(rows) + x.shape[1:]) for x in leaves]
        return super()._read(rows, epoch)  # also to find which example is not like the first

    def _match_specs(self, leaves: list[Any]) -> bool:
        return all(
            isinstance(leaf, np.ndarray)
            and leaf.shape[1:] == spec.shape
            # A scalar of a row is a NumPy scalar, which says its dtype, as its column does.
            and leaf.dtype == spec.dtype
            for leaf, spec in zip(leaves, self._leaf_specs, strict=True)
        )


class HuggingFaceBatches(iterable.IterableSource):
    """Rows of a `Dataset` or `IterableDataset`, each of which is a global batch."""

    def _open(self, state: Any = None) -> Iterator[PyTree]:
        dataset: Any = self._source
        return _StatefulIterator(dataset) if hasattr(dataset, "state_dict") else iter(dataset)


class _StatefulIterator(Iterator[PyTree]):
    """An iterator of an `IterableDataset`, which keeps its state in the dataset itself."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._iterator: Iterator[PyTree] | None = None

    def __next__(self) -> PyTree:
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return next(self._iterator)

    def get_state(self) -> Any:
        return self._dataset.state_dict()

    def set_state(self, state: Any) -> None:
        self._dataset.load_state_dict(state)
        self._iterator = None


def _with_numpy_format(dataset: Any) -> Any:
    """With NumPy arrays for columns, unless the user's own function makes them."""
    if getattr(dataset, "format", {}).get("type") in ("numpy", "custom"):
        return dataset
    return dataset.with_format("numpy")
