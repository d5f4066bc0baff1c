"""Datasets whose examples are read one by one, in several threads, and stacked to batches."""

import concurrent.futures
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input import permutation
from tpudist.input.daemon_threads import DaemonThreads
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.transfer import host_batch, reused_memory

RandomTransform: TypeAlias = Callable[[PyTree, np.random.Generator], PyTree]

# More threads of one dataset rarely help: Python runs one at a time, and the steps need some too.
_MAX_THREADS = 8
# Fewest examples for one thread: for fewer, the handover costs more than it saves.
_MIN_CHUNK = 4


@runtime_checkable
class Records(Protocol):
    """An object with a length and indices, such as a list or a PyTorch dataset."""

    def __len__(self) -> int:
        """Number of records."""
        ...

    def __getitem__(self, number: Any, /) -> Any:
        """Returns a record."""
        ...


def libraries_of(value: object) -> set[str]:
    """Returns the top-level packages of the classes of an object."""
    return {cls.__module__.partition(".")[0] for cls in type(value).__mro__}


class RecordDataset(IndexedDataset):
    """Examples that several threads read by number; the examples of a batch are stacked.

    All examples must have the structure, shapes and dtypes of the first one, which is read at once.
    """

    def __init__(
        self,
        source: Any,
        transform: Callable[[Any], PyTree] | None = None,
        *,
        random_transform: RandomTransform | None = None,
        num_threads: int | None = None,
    ):
        self._source = source
        # A method of PyTorch's datasets, which reads several records faster than one by one. On the
        # class: a wrapper that passes on unknown names may change the records in `__getitem__`.
        has_method = hasattr(type(source), "__getitems__")
        self._fetch_several = source.__getitems__ if has_method else None
        self._num_rows = _length(source)
        self._set_up(transform, random_transform, num_threads)

    def _set_up(
        self,
        transform: Callable[[Any], PyTree] | None,
        random_transform: RandomTransform | None,
        num_threads: int | None,
    ) -> None:
        """Sets the functions and reads the first example. Call it last: it uses `_fetch`."""
        if random_transform is not None and not callable(random_transform):
            raise TypeError(
                f"random_transform={random_transform!r}: it must be a function of an example and a "
                "numpy.random.Generator that returns a pytree of arrays."
            )
        if transform is not None and not callable(transform):
            raise TypeError(
                f"transform is a {type(transform).__name__}. Pass a function of one record that "
                "returns a pytree of arrays."
            )
        if num_threads is None:
            num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
            raise ValueError(f"num_threads={num_threads!r}: it must be an integer of at least 1.")
        self._transform = transform
        self._random_transform = random_transform
        self._threads = _Threads(num_threads)
        if not self._num_rows:  # the shapes of an example are unknown
            self._treedef, self._leaf_specs = jax.tree_util.tree_structure(None), []
            return
        (first,) = self._transform_records([0], self._fetch([0]), epoch=0)
        leaves, self._names, self._treedef = self._example(0, first)
        if not leaves:
            raise ValueError(
                f"{self._name(0)} holds no arrays. Use examples with at least one array."
            )
        self._leaf_specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    # Hooks.

    def _fetch(self, numbers: list[int]) -> Sequence[Any]:
        """Returns the records with these numbers; several threads call it at once."""
        # A single number is read like the first example, whose shapes all others must have.
        if self._fetch_several is not None and len(numbers) > 1:
            return self._fetch_several(numbers)
        return [self._source[number] for number in numbers]

    def _name(self, number: int) -> str:
        """Returns the name of an example for errors."""
        return f"Example {number} of the {type(self._source).__name__}"

    # Shared by all datasets of records.

    def _read(self, rows: np.ndarray, epoch: int) -> list[np.ndarray]:
        flat = np.asarray(rows).reshape(-1)
        stacked = [reused_memory.empty((len(flat), *x.shape), x.dtype) for x in self._leaf_specs]

        def fill(start: int, end: int) -> None:
            numbers = flat[start:end].tolist()
            records = self._transform_records(numbers, self._fetch(numbers), epoch)
            for row, number, record in zip(range(start, end), numbers, records, strict=True):
                leaves = self._leaves_of(number, record)
                for target, leaf in zip(stacked, leaves, strict=True):
                    target[row] = leaf

        self._threads.run(fill, len(flat))
        return [leaf.reshape(np.shape(rows) + leaf.shape[1:]) for leaf in stacked]

    @property
    def _is_transformed(self) -> bool:
        """Whether a user's function makes the examples from the records."""
        return self._transform is not None or self._random_transform is not None

    def _transform_records(
        self, numbers: list[int], records: Sequence[Any], epoch: int
    ) -> Iterator[Any]:
        """Yields the examples that the user's functions make from records."""
        if not self._is_transformed:
            yield from records
            return
        for number, example in zip(numbers, records, strict=True):
            try:
                if self._transform is not None:
                    example = self._transform(example)
                if self._random_transform is not None:
                    example = self._random_transform(example, self._rng(epoch, number))
            except Exception as error:
                error.add_note(f"This error was raised for {self._name(number)}.")
                raise
            yield example

    def _rng(self, epoch: int, number: int) -> np.random.Generator:
        seed = self._settings.seed or 0  # also without a shuffle
        seeds = (
            np.random.SeedSequence([seed, epoch], spawn_key=(number,))
            if self._settings.is_old
            else permutation.seeds_of_example(seed, epoch, number)
        )
        return np.random.Generator(np.random.PCG64(seeds))

    def _leaves_of(self, number: int, example: PyTree) -> list[Any]:
        """Returns the leaves of an example; raises `ValueError` if they differ from the first's."""
        # Most examples are pytrees of NumPy arrays that match at once; this runs for each.
        leaves, treedef = jax.tree_util.tree_flatten(example)
        if treedef == self._treedef and all(map(_matches, leaves, self._leaf_specs)):
            return leaves
        leaves, _, treedef = self._example(number, example)
        self._check_like_first(number, leaves, treedef)
        return leaves

    def _example(
        self, number: int, example: PyTree
    ) -> tuple[list[np.ndarray], list[str], jax.tree_util.PyTreeDef]:
        """Returns the arrays of an example, their names, and its structure."""
        if example is None:
            raise ValueError(
                f"{self._name(number)} is None. tpudist cannot skip an example when it reads it, "
                "because batches are counted before. Filter the source first."
            )
        texts = [x for x in jax.tree_util.tree_leaves(example) if isinstance(x, str | bytes)]
        if texts:
            text_type = "bytes" if isinstance(texts[0], bytes) else "str"
            raise TypeError(
                f"{self._name(number)} holds {text_type}, but devices hold only numbers and "
                f"booleans. {self._text_remedy(text_type)}"
            )
        return host_batch.as_arrays(example, self._name(number))

    def _text_remedy(self, text_type: str) -> str:
        """Returns the advice for examples with text; `text_type` is `bytes` or `str`."""
        del text_type
        return "Omit it, or convert it to numbers: from_records(source, transform=function)."

    def _check_like_first(
        self, number: int, leaves: list[np.ndarray], treedef: jax.tree_util.PyTreeDef
    ) -> None:
        if treedef != self._treedef:
            raise ValueError(
                f"{self._name(number)} has the structure {treedef}, but the first one has "
                f"{self._treedef}. Use the same structure for all examples."
            )
        for name, leaf, spec in zip(self._names, leaves, self._leaf_specs, strict=True):
            if leaf.shape == spec.shape and leaf.dtype == spec.dtype:
                continue
            is_ragged = leaf.shape != spec.shape
            remedy = "Pad or crop all to one shape." if is_ragged else "Convert all to one dtype."
            raise ValueError(
                f"{self._name(number)} holds {_describe(leaf)}{name and f' in {name}'}, but the "
                f"first one {_describe(spec)}. {remedy}"
            )


class _Threads:
    """Threads that start with the first batch, and end with the last dataset that shares them."""

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        self._threads = DaemonThreads(num_threads, "tpudist-read")

    def run(self, function: Callable[[int, int], None], count: int) -> None:
        """Calls `function(start, end)` for parts of `range(count)`, in several threads."""
        chunk = max(_MIN_CHUNK, -(-count // self.num_threads))
        if self.num_threads == 1 or count <= chunk:
            function(0, count)
            return
        starts = range(0, count, chunk)
        parts = [self._threads.submit(function, i, min(i + chunk, count)) for i in starts]
        # All parts end before an error is raised: their memory is reused for the next batch.
        concurrent.futures.wait(parts)
        for part in parts:
            part.result()


def _matches(leaf: object, spec: jax.ShapeDtypeStruct) -> bool:
    """Whether a leaf is a NumPy array with this shape and dtype."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape == spec.shape and leaf.dtype == spec.dtype
    return False


def _length(source: Records) -> int:
    if isinstance(source, dict | str | bytes) or not isinstance(source, Records):
        raise TypeError(
            f"A {type(source).__name__} has no examples that can be read by number. Pass an object "
            "with len(source) and source[i]; distribute an iterable of batches as it is."
        )
    length = len(source)
    if length >= np.iinfo(np.int64).max:  # the length of an endless `repeat` of Grain
        raise ValueError(
            f"The {type(source).__name__} has no end. Remove its repeat, and call repeat on the "
            "result of from_records."
        )
    return length


def _describe(array: np.ndarray | jax.ShapeDtypeStruct) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
