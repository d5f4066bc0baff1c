"""Which process reads what of a dataset: decided once, when it is distributed, and told.

All that reads the same dataset in every process, and takes its own rows, is a function of (seed,
step, global batch): the same on any number of processes. Only what the user says differs between
processes is read as it is.
"""

import dataclasses
import warnings
from typing import Any

import jax

from tpudist.input.feeds.per_replica_batches import Pipelines
from tpudist.input.feeds.rebatch import Rebatched
from tpudist.input.feeds.split_batches import SplitBatches
from tpudist.input.sources import adapt
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.options import AutoShardPolicy, PartialBatch
from tpudist.xla.mesh import ReplicaMesh

_OWN_DATA = (AutoShardPolicy.OFF, AutoShardPolicy.HINT)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a dataset is shared out.

    Attributes:
        policy: What was chosen; None where nothing is shared out.
        why: Why, and what it costs.
    """

    policy: AutoShardPolicy | None
    why: str


def make_feed(
    dataset: Any,
    mesh: ReplicaMesh,
    partial_batch: PartialBatch | str | None,
    asked: AutoShardPolicy,
) -> tuple[SplitBatches | Pipelines, Sharding]:
    """What feeds the replicas of this process, and how the dataset is shared out for that.

    Raises:
        TypeError: `dataset` gives no batches.
        ValueError: It is not batched, or cannot be shared out as asked.
    """
    processes = mesh.processes
    several = len(processes) > 1
    source = adapt.to_source(dataset)
    if asked is AutoShardPolicy.AUTO:  # a dataset may have options of its own, as tf.data's
        asked = getattr(source, "auto_shard_policy", asked)
    if isinstance(source, IndexedDataset):
        source = _apply_hint(source, asked, processes)
    elif several and asked is AutoShardPolicy.HINT:
        raise ValueError(_describe_missing_hint(source))
    if several and asked in _OWN_DATA:
        _require_whole_replicas(mesh, asked)
        parts = Rebatched(source, mesh.num_replicas, PartialBatch.of(partial_batch))
        why = "each process has its own data, and its replicas take parts of the batches"
        return Pipelines([parts], mesh, must_differ=True), Sharding(asked, why)
    if asked is AutoShardPolicy.FILE:
        source = _shard_by_files(source, len(processes))
    fills_first = not several and asked in _OWN_DATA
    batches = SplitBatches(source, mesh, partial_batch, fills_first=fills_first)
    if not several:
        return batches, Sharding(None, "one process reads all")
    if asked is AutoShardPolicy.FILE:
        why = "each process reads the rows of its own replicas, in an order by files"
        return batches, Sharding(asked, why)
    if isinstance(source, IndexedDataset):
        why = "examples are read by number, each by the process whose replica takes it"
    else:
        why = (
            f"each of {len(processes)} processes reads and decodes all of it, and keeps its own "
            "rows; if that is too slow, use examples that can be read by number, or give each "
            "process its own data with AutoShardPolicy.OFF"
        )
    return batches, Sharding(AutoShardPolicy.DATA, why)


def _apply_hint(
    source: IndexedDataset, asked: AutoShardPolicy, processes: tuple[int, ...]
) -> IndexedDataset:
    """`source` with numbers for its `SHARD_HINT`, if it has one."""
    if source.has_shard_hint and asked is not AutoShardPolicy.HINT:
        raise ValueError(
            "The dataset has shard(SHARD_HINT, SHARD_HINT), but is distributed with "
            f"AutoShardPolicy.{asked.name}. Use "
            "InputOptions(auto_shard_policy=AutoShardPolicy.HINT), or remove the shard."
        )
    if asked is AutoShardPolicy.HINT and source.has_shard_hint:
        mine = processes.index(jax.process_index()) if len(processes) > 1 else 0
        return source.with_shard_hint(len(processes), mine)
    if asked is AutoShardPolicy.HINT and len(processes) > 1:
        raise ValueError(_describe_missing_hint(source))
    return source


def _describe_missing_hint(source: Any) -> str:
    return (
        f"AutoShardPolicy.HINT: the {name_of(source)} has no SHARD_HINT, so every process would "
        "read the same data. Call dataset.shard(SHARD_HINT, SHARD_HINT) on examples that can be "
        "read by number, or use AutoShardPolicy.DATA."
    )


def _shard_by_files(source: Any, num_processes: int) -> Any:
    num_files = getattr(source, "num_files", None)
    if num_files is None:
        if num_processes == 1:
            return source
        raise ValueError(
            f"AutoShardPolicy.FILE: the {name_of(source)} is not read from files that processes "
            "can share. Use AutoShardPolicy.DATA or AUTO."
        )
    if num_files < num_processes:
        warnings.warn(
            f"AutoShardPolicy.FILE divides {num_files} files among {num_processes} processes, so "
            "several processes open the same file and each reads its own part. No example is read "
            f"twice. Write at least {num_processes} files so that each process has its own.",
            stacklevel=2,
        )
    return source.with_order_by_files()


def _require_whole_replicas(mesh: ReplicaMesh, asked: AutoShardPolicy) -> None:
    for replica in range(mesh.num_replicas):
        if len({device.process_index for device in mesh.devices_of(replica)}) > 1:
            raise ValueError(
                f"AutoShardPolicy.{asked.name} gives each process its own data, but replica "
                f"{replica} spans several processes, which must all receive the same data. Use "
                "AutoShardPolicy.DATA, with the same dataset in every process."
            )


def name_of(source: Any) -> str:
    """What to call a source."""
    return getattr(source, "name", type(source).__name__)
