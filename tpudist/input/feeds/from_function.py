"""Calls a user's dataset function for each process or replica, and checks `InputOptions`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.input.feeds.per_replica_batches import Pipelines
from tpudist.input.input_context import InputContext
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.options import (
    AutoShardPolicy,
    InputOptions,
    InputReplicationMode,
    PartialBatch,
    shorten,
    warn_if_given,
)
from tpudist.xla.mesh import ReplicaMesh

_PER_REPLICA = InputReplicationMode.PER_REPLICA


def check_options(options: object) -> InputOptions | None:
    """Returns `options`; raises `TypeError` if they are not `InputOptions` or None."""
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(
            f"options={shorten(options)}: the options of a dataset must be a tpudist.InputOptions "
            "or None."
        )
    return options


def options_of_split(options: object) -> InputOptions | None:
    """Returns the options of a dataset whose batches are split.

    Raises:
        NotImplementedError: If they request a dataset per replica.
        TypeError: If they are not `InputOptions`.
    """
    options = check_options(options)
    if options is None:
        return None
    if options.experimental_replication_mode is _PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is only supported in "
            "`distribute_datasets_from_function`: there is one dataset, whose batches are split. "
            "Use PER_WORKER, or give a function that makes a dataset for each replica."
        )
    _warn_of_placement(options)
    return options


def options_of_function(
    options: object, strategy: StrategyBase, per_replica: bool
) -> InputOptions | None:
    """Returns the options of datasets from a function, with the checks of TensorFlow.

    Raises:
        NotImplementedError: If they request a dataset per replica, and `per_replica` is False.
        ValueError: If they contradict each other.
        TypeError: If they are not `InputOptions`.
    """
    options = check_options(options)
    if options is None:
        return None
    partial_batch = PartialBatch.of(options.partial_batch)
    if partial_batch is not PartialBatch.PAD:
        raise ValueError(
            f"InputOptions(partial_batch={partial_batch.value!r}) is not supported for datasets "
            "from a function: its batches belong to one replica each, and a smaller one is padded "
            "and counted exactly. Omit it, or batch with drop_remainder=True in the function."
        )
    if options.auto_shard_policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.OFF):
        warn_if_given(
            "InputOptions(auto_shard_policy",
            options.auto_shard_policy,
            "the function makes each process's part of the data itself, from its InputContext",
        )
    if options.experimental_replication_mode is _PER_REPLICA:
        if not per_replica:
            raise NotImplementedError(
                f"InputReplicationMode.PER_REPLICA is only supported in "
                f"`distribute_datasets_from_function` of tpudist.MirroredStrategy, not of "
                f"{strategy!r}. Use PER_WORKER: the replicas of a process take batches of its "
                f"dataset in turn."
            )
        if options.experimental_place_dataset_on_device and options.experimental_fetch_to_device:
            raise ValueError(
                "`experimental_place_dataset_on_device` can not be set to True when "
                "experimental_fetch_to_device is True and replication mode is set to "
                "`PER_REPLICA`. Set one of them to False."
            )
    elif options.experimental_place_dataset_on_device:
        raise ValueError(
            "When `experimental_place_dataset_on_device` is set for dataset placement, you must "
            "also specify `PER_REPLICA` for the replication mode. Or omit it: datasets are read on "
            "the host."
        )
    _warn_of_placement(options)
    return options


def _warn_of_placement(options: InputOptions) -> None:
    if options.experimental_place_dataset_on_device:
        warn_if_given(
            "InputOptions(experimental_place_dataset_on_device",
            True,
            "datasets are read on the host",
        )


def dataset_options(options: InputOptions | None) -> dict[str, Any]:
    """Returns the arguments of `DistributedDataset` for `options`."""
    if options is None:
        return {}
    return {
        "prefetch": options.experimental_per_replica_buffer_size,
        "fetch_to_device": options.experimental_fetch_to_device,
        "partial_batch": options.partial_batch,
        "auto_shard_policy": options.auto_shard_policy,
    }


def pipelines(
    dataset_fn: Callable[[InputContext], Any],
    replica_mesh: ReplicaMesh,
    options: InputOptions | None = None,
) -> Pipelines:
    """Calls `dataset_fn` for this process, or for each replica if `options` request it.

    Raises:
        NotImplementedError: If a replica spans several processes, whose functions might return
            different data for it.
        TypeError: If `dataset_fn` is not a function, or does not return a dataset.
    """
    if not callable(dataset_fn):
        raise TypeError(
            f"A dataset function is a {type(dataset_fn).__name__}. Pass a function of one "
            "argument, a tpudist.InputContext."
        )
    per_replica = options is not None and options.experimental_replication_mode is _PER_REPLICA
    contexts = _contexts(replica_mesh, per_replica)
    return Pipelines([dataset_fn(context) for context in contexts], replica_mesh)


def pipelines_or_calls(
    input_fn: Callable[[InputContext], Any], replica_mesh: ReplicaMesh
) -> tuple[Pipelines, InputOptions | None]:
    """Returns the same as `pipelines`; `input_fn` may also return a function of single batches.

    Returns:
        The pipelines and, if `input_fn` returned a function, options without a buffer: such a
        function may have other effects, so it must not be called ahead of the loop.
    """
    options = None

    def dataset_fn(context: InputContext) -> Any:
        nonlocal options
        dataset = input_fn(context)
        if isinstance(dataset, IndexedDataset | Iterable):
            return dataset
        if not callable(dataset):
            raise ValueError(
                f"input_fn returned a {type(dataset).__name__}. It must return a dataset (an "
                f"iterable of batches, or a NumpyDataset) or a function without arguments."
            )
        options = InputOptions(experimental_per_replica_buffer_size=0)
        return _Calls(dataset)

    feed = pipelines(dataset_fn, replica_mesh)
    return feed, options


class _Calls(Iterable[PyTree]):
    """The results of a function, call by call, until it raises StopIteration."""

    def __init__(self, function: Callable[[], PyTree]):
        self._function = function

    def __iter__(self) -> Iterator[PyTree]:
        while True:
            # A StopIteration in a generator would become a RuntimeError.
            try:
                element = self._function()
            except StopIteration:
                return
            yield element


def _contexts(mesh: ReplicaMesh, per_replica: bool) -> list[InputContext]:
    n = mesh.num_replicas
    if per_replica:
        return [InputContext(n, replica, n) for replica in mesh.local_replicas]
    owners = [{d.process_index for d in row} for row in mesh.mesh.devices.reshape(n, -1)]
    if any(len(processes) > 1 for processes in owners):
        raise NotImplementedError(
            "Each process would have its own dataset, but a replica spans several processes, which "
            "must all receive the same data. Use experimental_distribute_dataset, with the same "
            "global batches in every process."
        )
    # The index among the processes of this mesh, which may be fewer than all processes.
    processes = sorted(set().union(*owners))
    return [InputContext(len(processes), processes.index(jax.process_index()), n)]
