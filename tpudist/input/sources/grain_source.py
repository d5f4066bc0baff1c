"""Grain's datasets and loaders of global batches, whose iterators know where they are."""

import sys
from collections.abc import Iterator
from typing import Any

import grain
from absl import flags

from tpudist.array_types import PyTree
from tpudist.input.sources import iterable
from tpudist.input.sources.indexed_dataset import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

# A `MapDataset` is read ahead by this many threads, and as many batches wait. Grain's own default
# is 500 elements, which are meant to be examples; here each is a global batch.
_NUM_THREADS = 4


class GrainSource(iterable.IterableSource):
    """The elements of a `grain.MapDataset`, `grain.IterDataset` or `grain.DataLoader` as batches.

    Every pass gives what Grain gives: the same order each time, unless the dataset reshuffles when
    it repeats.
    """

    shuffles_anew = False

    def __init__(self, source: Any):
        """Wraps a Grain object."""
        super().__init__(source)
        self.plan = {"kind": f"batches of a {_kind(source)} of Grain"}
        self.name = f"grain.{_kind(source)}"

    @property
    def cardinality(self) -> int:
        """Number of batches of a pass; -1 if it has no end, -2 if not known."""
        source: Any = self._source
        if not isinstance(source, grain.MapDataset):
            return UNKNOWN_CARDINALITY
        return INFINITE_CARDINALITY if len(source) == sys.maxsize else len(source)

    def _open(self) -> Iterator[PyTree]:
        source: Any = self._source
        # Grain's worker processes are given the flags of this one, and refuse if nobody has read
        # them; a program that uses absl has done so by now.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        if isinstance(source, grain.MapDataset):
            options = grain.ReadOptions(num_threads=_NUM_THREADS, prefetch_buffer_size=_NUM_THREADS)
            return iter(source.to_iter_dataset(options))
        return iter(source)


def _kind(source: Any) -> str:
    for kind in (grain.MapDataset, grain.IterDataset, grain.DataLoader):
        if isinstance(source, kind):
            return kind.__name__
    return type(source).__name__


def is_grain(source: Any) -> bool:
    """Whether Grain made this."""
    return isinstance(source, grain.MapDataset | grain.IterDataset | grain.DataLoader)
