"""What may be given as a dataset: every kind becomes host batches, one iterator of them per pass.

A source has `global_batch_size` (None: the rows of its first batch), `cardinality`, `element_spec`
and `host_batches(pass_number)`.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tpudist.input import host_batch
from tpudist.input.host_batch import HostBatch
from tpudist.input.numpy_dataset import UNKNOWN_CARDINALITY, NumpyDataset

PyTree = Any
Source = Iterable[PyTree] | Callable[[], Iterable[PyTree]]

NO_BATCHES = (
    "A pass through the dataset gave no batches. If it reads from an iterator that is used up by "
    "now, give a function that makes a new one for each pass."
)


def checked(source: Any) -> "NumpyDataset | IterableSource":
    """What a user gave as a dataset, as a source of host batches.

    Raises:
        ValueError: It is not batched.
        TypeError: It gives no batches.
    """
    if isinstance(source, NumpyDataset):
        if source.global_batch_size is None:
            raise ValueError(
                "The NumPy dataset is not batched. Distribute dataset.batch(global_batch_size)."
            )
        return source
    kind = type(source).__name__
    if isinstance(source, dict | str | bytes | np.ndarray | jax.Array):
        raise TypeError(
            f"A {kind} is not a dataset of batches. For arrays in memory, distribute "
            f"strategy.experimental_make_numpy_dataset(arrays).batch(global_batch_size)."
        )
    if not isinstance(source, Iterable) and not callable(source):
        raise TypeError(
            f"A {kind} is not a dataset. Give an iterable of global batches (pytrees of arrays), "
            f"or a function that returns one for each pass."
        )
    passes: Any = source
    return IterableSource(passes)


class IterableSource:
    """A user's batches: an iterable, or a function that returns one for each pass."""

    global_batch_size = None

    def __init__(self, source: Source):
        """Wraps what `checked` has checked."""
        self._source = source
        self._used_up = False

    @property
    def cardinality(self) -> int:
        """Number of batches of a pass, or -2 if not known."""
        try:
            return len(self._source)  # type: ignore[arg-type]
        except TypeError:
            return UNKNOWN_CARDINALITY

    def host_batches(self, pass_number: int) -> Iterator[HostBatch]:
        """The batches of the next pass."""
        del pass_number  # each pass is whatever the source makes of it
        return map(host_batch.from_element, self.elements(), itertools.count())

    @functools.cached_property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of the first batch, which is read for it."""
        batch = host_batch.from_element(self.first(), 0)
        return batch.treedef.unflatten(
            [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in batch.leaves]
        )

    def first(self) -> PyTree:
        """The first batch, as the user's dataset gives it."""
        iterator = self.elements()
        first = list(itertools.islice(iterator, 1))
        if iterator is self._source:  # its only pass: put back what was read of it
            self._source, self._used_up = itertools.chain(first, iterator), False
        if not first:
            raise ValueError(NO_BATCHES)
        return first[0]

    def elements(self) -> Iterator[PyTree]:
        """The batches of the next pass, as the user's dataset gives them."""
        source = self._source
        iterator = iter(source if isinstance(source, Iterable) else source())
        if iterator is source:
            if self._used_up:
                raise ValueError(
                    f"A second pass through the dataset was asked for, but it is a "
                    f"{type(source).__name__}, which can be gone through once. Give a function "
                    f"that makes a new one for each pass, such as the generator function itself."
                )
            self._used_up = True
        return iterator
