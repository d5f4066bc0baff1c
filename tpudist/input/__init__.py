"""Where data come from: sources of global batches, split over the replicas and prefetched."""

from tpudist.input.dataset import DistributedDataset
from tpudist.input.explanation import Explanation, explain
from tpudist.input.file_formats.tf_example import parse_example
from tpudist.input.files import FileDataset, from_files
from tpudist.input.indexed import SHARD_HINT, IndexedDataset
from tpudist.input.iterator import DistributedIterator
from tpudist.input.numpy_dataset import NumpyDataset
from tpudist.input.records import RecordDataset, from_records
from tpudist.options import AutoShardPolicy, PartialBatch

__all__ = [
    "SHARD_HINT",
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedIterator",
    "Explanation",
    "FileDataset",
    "IndexedDataset",
    "NumpyDataset",
    "PartialBatch",
    "RecordDataset",
    "explain",
    "from_files",
    "from_records",
    "parse_example",
]
