"""Decides, when a dataset is distributed, which data each process reads.

By default every process has the same dataset and takes the rows of its own replicas. Then the
global batches are the same on any number of processes. Only with AutoShardPolicy OFF and HINT does
each process have its own data.
"""

import dataclasses
import warnings

import jax

from tpudist.input.feeds.per_replica_batches import WholeBatches
from tpudist.input.feeds.rebatch import Rebatched
from tpudist.input.feeds.split_batches import SplitBatches
from tpudist.input.sources import adapt
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.sources.iterable import IterableSource
from tpudist.options import AutoShardPolicy, PartialBatch
from tpudist.xla.mesh import ReplicaMesh

_OWN_DATA = (AutoShardPolicy.OFF, AutoShardPolicy.HINT)


@dataclasses.dataclass(frozen=True)
class Division:
    """The division of a dataset among processes.

    Attributes:
        policy: The policy in use; None for one process, whose data are not shared.
        why: The reason, and the cost, as text.
    """

    policy: AutoShardPolicy | None
    why: str


def make_feed(
    dataset: object,
    mesh: ReplicaMesh,
    partial_batch: PartialBatch | str | None,
    policy: AutoShardPolicy,
) -> tuple[SplitBatches | WholeBatches, Division]:
    """Returns the feed of this process's replicas, and the division of the dataset.

    Raises:
        TypeError: If `dataset` is not a dataset of batches.
        ValueError: If it is not batched, or does not support `policy`.
    """
    processes = mesh.processes
    several = len(processes) > 1
    source = adapt.to_source(dataset)
    # The policy of the dataset, such as one of a tf.data.Dataset, applies unless you request one.
    if policy is AutoShardPolicy.AUTO:
        policy = source.auto_shard_policy
    if isinstance(source, IndexedDataset):
        source = _apply_hint(source, policy, processes)
    elif several and policy is AutoShardPolicy.HINT:
        raise ValueError(_describe_missing_hint(source))
    if several and policy in _OWN_DATA:
        _require_whole_replicas(mesh, policy)
        parts = Rebatched(source, mesh.num_replicas, PartialBatch.of(partial_batch))
        why = "each process has its own data, and its replicas take parts of the batches"
        return WholeBatches([parts], mesh, must_differ=True), Division(policy, why)
    if policy is AutoShardPolicy.FILE:
        source = _order_by_files(source, len(processes))
    # With one process, OFF and HINT differ from the default only in how they split a partial
    # batch, so that results match the same run with several processes.
    fills_first = not several and policy in _OWN_DATA
    batches = SplitBatches(source, mesh, partial_batch, fills_first=fills_first)
    if not several:
        return batches, Division(None, "one process reads all")
    if policy is AutoShardPolicy.FILE:
        why = "each process reads the rows of its own replicas, in an order by files"
        return batches, Division(policy, why)
    if isinstance(source, IndexedDataset):
        why = "examples are read by number, each by the process whose replica takes it"
    else:
        why = (
            f"each of {len(processes)} processes reads and decodes all of it, and keeps its own "
            "rows; if that is too slow, use examples that can be read by number, or give each "
            "process its own data with AutoShardPolicy.OFF"
        )
    return batches, Division(AutoShardPolicy.DATA, why)


def _apply_hint(
    source: IndexedDataset, policy: AutoShardPolicy, processes: tuple[int, ...]
) -> IndexedDataset:
    """Returns `source` with this process's shard in place of a `SHARD_HINT`."""
    if source.has_shard_hint and policy is not AutoShardPolicy.HINT:
        raise ValueError(
            "The dataset has shard(SHARD_HINT, SHARD_HINT), but is distributed with "
            f"AutoShardPolicy.{policy.name}. Use "
            "InputOptions(auto_shard_policy=AutoShardPolicy.HINT), or remove the shard."
        )
    if policy is AutoShardPolicy.HINT and source.has_shard_hint:
        index = processes.index(jax.process_index()) if len(processes) > 1 else 0
        return source.with_shard_hint(len(processes), index)
    if policy is AutoShardPolicy.HINT and len(processes) > 1:
        raise ValueError(_describe_missing_hint(source))
    return source


def _describe_missing_hint(source: IndexedDataset | IterableSource) -> str:
    return (
        f"AutoShardPolicy.HINT: the {source.name} has no SHARD_HINT, so every process would "
        "read the same data. Call dataset.shard(SHARD_HINT, SHARD_HINT) on examples that can be "
        "read by number, or use AutoShardPolicy.DATA."
    )


def _order_by_files(
    source: IndexedDataset | IterableSource, num_processes: int
) -> IndexedDataset | IterableSource:
    if not isinstance(source, IndexedDataset) or source.num_files is None:
        if num_processes == 1:
            return source
        raise ValueError(
            f"AutoShardPolicy.FILE: the {source.name} is not read from files that processes "
            "can share. Use AutoShardPolicy.DATA or AUTO."
        )
    if source.num_files < num_processes:
        warnings.warn(
            f"AutoShardPolicy.FILE divides {source.num_files} files among {num_processes} "
            "processes, so several processes open the same file and each reads its own part. No "
            f"example is read twice. Write at least {num_processes} files so that each process has "
            "its own.",
            stacklevel=6,  # your call of `experimental_distribute_dataset`
        )
    return source.with_order_by_files()


def _require_whole_replicas(mesh: ReplicaMesh, policy: AutoShardPolicy) -> None:
    for replica in range(mesh.num_replicas):
        if len({device.process_index for device in mesh.devices_of(replica)}) > 1:
            raise ValueError(
                f"AutoShardPolicy.{policy.name} gives each process its own data, but replica "
                f"{replica} spans several processes, which must all receive the same data. Use "
                "AutoShardPolicy.DATA, with the same dataset in every process."
            )
