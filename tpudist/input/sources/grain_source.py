"""Source for Grain's datasets and loaders of global batches, whose iterators have a state."""

import sys
from collections.abc import Iterator
from typing import TypeAlias

import grain
from absl import flags

from tpudist.array_types import PyTree
from tpudist.input.sources import iterable
from tpudist.input.sources.indexed_dataset import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

GrainDataset: TypeAlias = grain.MapDataset | grain.IterDataset | grain.DataLoader

# A `MapDataset` is read ahead by this many threads, and as many batches wait. Grain's own default
# is 500 elements, for elements that are examples; here each element is a global batch.
_NUM_THREADS = 4


class GrainSource(iterable.IterableSource):
    """The elements of a Grain dataset or loader as batches.

    Every pass has the order that Grain gives it: the same each time, unless the dataset reshuffles
    when it repeats.
    """

    depends_on_passes = False

    def __init__(self, dataset: GrainDataset):
        super().__init__(dataset)
        self._dataset = dataset
        self.plan = {"kind": f"batches of a {_class_name(dataset)} of Grain"}
        self.name = f"grain.{_class_name(dataset)}"

    @property
    def cardinality(self) -> int:
        """See `BatchSource`."""
        if not isinstance(self._dataset, grain.MapDataset):
            return UNKNOWN_CARDINALITY
        num_batches = len(self._dataset)
        return INFINITE_CARDINALITY if num_batches == sys.maxsize else num_batches

    def _open(self) -> Iterator[PyTree]:
        # Grain's worker processes receive the flags of this one, which raise an error if nobody
        # has parsed them. A program that uses absl has parsed them by now.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        if isinstance(self._dataset, grain.MapDataset):
            options = grain.ReadOptions(num_threads=_NUM_THREADS, prefetch_buffer_size=_NUM_THREADS)
            return iter(self._dataset.to_iter_dataset(options))
        return iter(self._dataset)


def _class_name(dataset: GrainDataset) -> str:
    """Returns the public class, not the private one of a transformation such as `batch`."""
    classes = (grain.MapDataset, grain.IterDataset, grain.DataLoader)
    return next(cls.__name__ for cls in classes if isinstance(dataset, cls))
