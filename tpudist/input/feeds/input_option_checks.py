"""Checks `InputOptions` for each method that makes a distributed dataset.

Errors with backticks in them have the texts of TensorFlow, which programs may match.
"""

from typing import Any

from tpudist.context.strategy_base import StrategyBase
from tpudist.options import (
    AutoShardPolicy,
    InputOptions,
    InputReplicationMode,
    PartialBatch,
    shorten,
    warn_if_given,
)

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


def arguments_of_dataset(options: InputOptions | None) -> dict[str, Any]:
    """Returns the arguments of `DistributedDataset` for `options`."""
    if options is None:
        return {}
    return {
        "prefetch": options.experimental_per_replica_buffer_size,
        "fetch_to_device": options.experimental_fetch_to_device,
        "partial_batch": options.partial_batch,
        "auto_shard_policy": options.auto_shard_policy,
    }
