"""Hugging Face datasets: examples read by number, many at a time, or batches one after another."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.sources import iterable, shuffle_seeds
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.sources.records import RandomTransform, RecordDataset


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
    return HuggingFaceBatches(dataset)


_SEVERAL = "A Hugging Face {} is several datasets: {}. Pass one of them."
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
    """Rows of a `Dataset` or `IterableDataset`, each of which is a global batch.

    A pass through a stream has the epoch that the user has set with `set_epoch` when it is first
    read. The order of an epoch does not depend on the passes before it.
    """

    shuffles_anew = False

    def _open(self) -> Iterator[PyTree]:
        if hasattr(self._source, "state_dict"):
            return _Stream(self._source)
        return iter(_with_numpy_format(self._source))

    def shuffle_without_seed(self) -> str | None:
        """A shuffle of a stream that has no seed."""
        return shuffle_seeds.find_in_stream(getattr(self._source, "_ex_iterable", None))


class _Stream(Iterator[PyTree]):
    """A pass through an `IterableDataset`, which keeps its position in the dataset itself.

    That position lacks the rows in a shuffle buffer. With such a buffer the rows are counted, and
    read again.
    """

    def __init__(self, users: Any):
        self._users = users
        self._dataset: Any = None
        self._can_tell = not _has_shuffle_buffer(getattr(users, "_ex_iterable", None))
        self._iterator: Iterator[PyTree] | None = None
        self._start: Any = None  # the state that the dataset begins at
        self._epoch: int | None = None
        self._num_given = 0

    def __next__(self) -> PyTree:
        if self._iterator is None:
            self._iterator = self._begin()
        row = next(self._iterator)
        self._num_given += 1
        return row

    def _begin(self) -> Iterator[PyTree]:
        if self._epoch is None:
            self._epoch = _epoch_of(self._users)
        else:  # the program that is resumed had set it
            self._users.set_epoch(self._epoch)
        # A copy for this pass: all iterations of a dataset begin at the state that it has loaded.
        self._dataset = copy.copy(_with_numpy_format(self._users))
        self._dataset.set_epoch(self._epoch)
        if self._start is not None:
            self._dataset.load_state_dict(self._start)
        iterator = iter(self._dataset)
        for _ in range(self._num_given if self._start is None else 0):
            next(iterator)
        return iterator

    def get_state(self) -> Any:
        """The epoch, and the position in it."""
        epoch = _epoch_of(self._users) if self._epoch is None else self._epoch
        told = self._can_tell and self._iterator is not None
        return {
            "epoch": epoch,
            "rows": self._num_given,
            "dataset": self._dataset.state_dict() if told else self._start,
        }

    def set_state(self, state: Any) -> None:
        """Begins at the position of a state."""
        if "rows" not in state:  # of a release that kept what the dataset said
            state = {"epoch": state.get("epoch", 0), "rows": 0, "dataset": state}
        self._epoch, self._num_given = state["epoch"], state["rows"]
        self._start = state["dataset"] if self._can_tell else None
        self._iterator = None


def _epoch_of(dataset: Any) -> int:
    return int(getattr(dataset, "epoch", getattr(dataset, "_epoch", 0)))


def _has_shuffle_buffer(iterable: Any) -> bool:
    """Whether a stream is made of one that keeps rows in a buffer, from which it draws them."""
    if type(iterable).__name__ == "BufferShuffledExamplesIterable" or iterable is None:
        return True
    below = [
        getattr(iterable, "ex_iterable", None),
        *(getattr(iterable, "ex_iterables", None) or ()),
    ]
    return any(_has_shuffle_buffer(each) for each in below if each is not None)


def _with_numpy_format(dataset: Any) -> Any:
    """With NumPy arrays for columns, unless the user's own function makes them."""
    if getattr(dataset, "format", {}).get("type") in ("numpy", "custom"):
        return dataset
    return dataset.with_format("numpy")
