"""Hugging Face datasets: examples that are read by number, or a stream of batches.

`datasets` is not a dependency, so its classes are known by their methods and names here.
"""

import copy
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.iterator_state import State
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
    """Returns a dataset of the examples of a `datasets.Dataset`; see `from_records`.

    Raises:
        TypeError: If the examples cannot be read by number, or do not consist of numbers.
    """
    _check_is_single(dataset)
    if not isinstance(dataset, Sized):
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
    """Returns a source for a `Dataset` or `IterableDataset` whose rows are batches.

    Raises:
        TypeError: If the rows are single examples.
    """
    _check_is_single(dataset)
    features = getattr(dataset, "features", None) or {}
    single = [name for name, x in features.items() if type(x).__name__ in _SINGLE_FEATURES]
    if single:
        by_number = (
            "tpudist.input.from_records(dataset).batch(global_batch_size), which reads each "
            "example once, or "
            if isinstance(dataset, Sized)
            else ""
        )
        raise TypeError(
            f"The Hugging Face {type(dataset).__name__} is not batched: its "
            f"{', '.join(map(repr, single))} holds one value for each row. Distribute "
            f"{by_number}dataset.batch(global_batch_size)."
        )
    return HuggingFaceBatches(dataset)


# Classes of features with one value per row; in a batch they are lists or arrays.
_SINGLE_FEATURES = ("Value", "ClassLabel", "Image", "Audio")


def _check_is_single(dataset: object) -> None:
    if isinstance(dataset, dict):  # such as a DatasetDict
        raise TypeError(
            f"A Hugging Face {type(dataset).__name__} is several datasets: "
            f"{', '.join(map(repr, dataset))}. Pass one of them."
        )


class HuggingFaceDataset(RecordDataset):
    """Examples of a `datasets.Dataset`; without a transform, whole columns are read as arrays."""

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
        # One by one: also to find the example that differs from the first one.
        return super()._read(rows, epoch)

    def _match_specs(self, leaves: list[Any]) -> bool:
        return all(
            isinstance(leaf, np.ndarray)
            and leaf.shape[1:] == spec.shape
            and leaf.dtype == spec.dtype
            for leaf, spec in zip(leaves, self._leaf_specs, strict=True)
        )


class HuggingFaceBatches(iterable.IterableSource):
    """The rows of a `Dataset` or `IterableDataset` as global batches.

    A pass through a stream has the epoch that you have set with `set_epoch` when the pass is first
    read. The order of an epoch does not depend on the passes before it.
    """

    depends_on_passes = False

    def _open(self) -> Iterator[PyTree]:
        if hasattr(self._source, "state_dict"):
            return _Stream(self._source)
        return iter(_with_numpy_format(self._source))

    def shuffle_without_seed(self) -> str | None:
        """See `BatchSource`; finds a shuffle of a stream without a seed."""
        return shuffle_seeds.find_in_stream(_examples_of(self._source))


class _Stream(Iterator[PyTree]):
    """A pass through an `IterableDataset`, whose own state has its position.

    That state lacks the rows in a shuffle buffer. So with a buffer, rows are counted and read again
    to resume.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self._dataset: Any = None  # the copy for this pass
        self._state_is_complete = not _has_shuffle_buffer(_examples_of(stream))
        self._iterator: Iterator[PyTree] | None = None
        self._start: State | None = None  # state of the dataset at which this pass begins
        self._epoch: int | None = None
        self._num_taken = 0

    def __next__(self) -> PyTree:
        if self._iterator is None:
            self._iterator = self._begin()
        row = next(self._iterator)
        self._num_taken += 1
        return row

    def _begin(self) -> Iterator[PyTree]:
        if self._epoch is None:
            self._epoch = _epoch_of(self._stream)
        else:  # from a state: the program that took it had set the epoch
            self._stream.set_epoch(self._epoch)  # also for your own later passes
        # A copy for this pass, because all iterations of a dataset begin at its loaded state.
        self._dataset = copy.copy(_with_numpy_format(self._stream))
        self._dataset.set_epoch(self._epoch)
        if self._start is not None:
            self._dataset.load_state_dict(self._start)
        iterator = iter(self._dataset)
        for _ in range(self._num_taken if self._start is None else 0):
            next(iterator)
        return iterator

    def get_state(self) -> State:
        """Returns the epoch, the number of rows, and the state of the dataset."""
        epoch = _epoch_of(self._stream) if self._epoch is None else self._epoch
        has_state = self._state_is_complete and self._iterator is not None
        return {
            "epoch": epoch,
            "rows": self._num_taken,
            "dataset": self._dataset.state_dict() if has_state else self._start,
        }

    def set_state(self, state: State) -> None:
        """Moves to the position of a state, at the next row."""
        if "rows" not in state:  # an early release stored only the state of the dataset
            state = {"epoch": state.get("epoch", 0), "rows": 0, "dataset": state}
        self._epoch, self._num_taken = state["epoch"], state["rows"]
        self._start = state["dataset"] if self._state_is_complete else None
        self._iterator = None


def _epoch_of(dataset: object) -> int:
    # A public property of `datasets` since 3.0, private before.
    return int(getattr(dataset, "epoch", getattr(dataset, "_epoch", 0)))


def _examples_of(stream: object) -> object:
    """Returns the private examples iterable of a stream; None if `datasets` has renamed it."""
    return getattr(stream, "_ex_iterable", None)


def _has_shuffle_buffer(examples: object) -> bool:
    """Whether a stream draws rows from a buffer; True also if its private parts are missing."""
    if type(examples).__name__ == "BufferShuffledExamplesIterable" or examples is None:
        return True
    return any(map(_has_shuffle_buffer, shuffle_seeds.inputs_of_stream(examples)))


def _with_numpy_format(dataset: Any) -> Any:
    """Returns the dataset with NumPy arrays for columns, unless your own function formats them."""
    if getattr(dataset, "format", {}).get("type") in ("numpy", "custom"):
        return dataset
    return dataset.with_format("numpy")
