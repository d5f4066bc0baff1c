"""Input data: sources of global batches, which are split over the replicas and prefetched."""

from tpudist.input.dataset import DistributedDataset
from tpudist.input.feeds.explain import Explanation, explain
from tpudist.input.file_formats.tf_example import parse_example
from tpudist.input.iterator import DistributedIterator
from tpudist.input.sources.dataset_settings import SHARD_HINT
from tpudist.input.sources.files import FileDataset, from_files
from tpudist.input.sources.from_records import from_records
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.sources.numpy_arrays import NumpyDataset
from tpudist.input.sources.records import RecordDataset
from tpudist.input.storage.remote_options import RemoteOptions
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
    "RemoteOptions",
    "explain",
    "from_files",
    "from_records",
    "parse_example",
]
