"""Options of calls, as frozen dataclasses, and warning classes that programs can filter."""

import dataclasses
import enum
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

# Name in `RunOptions.aggregation` that stands for all state in plain pytrees.
ALL_COLLECTIONS = ""
_AGGREGATIONS = ("none", "sum", "mean", "max", "min", "only_first_replica")
_MAX_REPR = 120  # characters


def warn_if_given(call: str, value: object, why: str) -> None:
    """Warns, if `value` is not None, that an argument of `tf.distribute` has no effect.

    Args:
        call: Start of the call with the parameter, such as `Checkpoint.save(options`.
        value: Value of the parameter.
        why: Reason, for the warning.
    """
    if value is not None:
        warnings.warn(f"{call}={shorten(value)}) has no effect: {why}.", stacklevel=3)


def warn_of_deprecation(name: str, instead: str, *, stacklevel: int = 3) -> None:
    """Warns that `name` is deprecated, at the line that uses it, and says what to do `instead`."""
    warnings.warn(f"{name} is deprecated: {instead}.", DeprecationWarning, stacklevel=stacklevel)


def warn_of_op_arguments(method: str, use_locking: bool, name: str | None) -> None:
    """Warns that a method ignores arguments that describe a TensorFlow graph operation."""
    if use_locking:
        warnings.warn(
            f"{method}(use_locking={use_locking!r}) has no effect: steps run one at a time.",
            stacklevel=3,
        )
    if name is not None:
        warnings.warn(
            f"{method}(name={name!r}) has no effect: tpudist does not name operations.",
            stacklevel=3,
        )


class UndistributedBatchWarning(UserWarning):
    """Warns that each replica computes with the whole of an array, and the results are added up.

    Each replica receives the whole array if you pass `Strategy.run` a NumPy array, or a `jax.Array`
    that is on one device or whose sharding splits its rows. So n replicas repeat the same work. A
    sum over the replicas (in an optimizer or `all_reduce`) is n times the sum on one device, unless
    it is divided by n, as a mean is. The warning appears once per function, with the line of the
    call, if all of these conditions hold:

    - Dim 0 of the array has more than one row.
    - No argument of the call is distributed, and the function captures no `PerReplica`.
    - An `all_reduce` (by sum or mean) in the function adds up a value that depends on the array and
      is equal on all replicas.
    - No value that is added up or returned has the array's shape, as parameters and state would.

    So these cases cause no warning: scalars, lookup tables next to a distributed batch, arrays from
    which each replica takes its own rows, functions that reduce nothing, and replicas that differ
    by their random numbers. To disable the warning:
    `warnings.filterwarnings("ignore", category=tpudist.UndistributedBatchWarning)`.

    Remedy: put the array in a dataset and distribute it with `experimental_distribute_dataset`, so
    that each replica has its own rows.
    """


class LocalMeanWarning(UserWarning):
    """Warns that a step computes a different new state than one device with all rows would.

    A step gets this warning once, when it is traced, with the factor, the line of the mean and the
    line of the reduction. tpudist traces each step that sums over replicas a second time, with more
    rows on more replicas, and derives from both traces how each value grows. A step is reported if
    it adds to its state, as a function of that state:

    - a value that is n times too large on n replicas, such as gradients of a mean over a replica's
      own rows that are summed, or a value that is already reduced and is summed again;
    - a value that is n times too small, such as an average of losses that are divided by all rows;
    - the sum of a share of each replica and of a value that is equal on all replicas, which then
      counts n times;
    - a mean over replicas of means over their own rows, if replicas have different numbers of rows.

    A step is also reported if it returns a reduced loss that is n times too large or too small, or
    if it gives `nnx.metrics.Average` its share of a loss. `Strategy.reduce("mean", loss)` is
    reported if the loss is a share of each replica.

    A step whose values cannot be followed, such as through a `while_loop` or a kernel, is not
    reported. A step that multiplies by a number that may be 1 / n is not reported either.
    `Strategy.verify` compares such steps with one device. To disable the warning:
    `warnings.filterwarnings("ignore", category=tpudist.LocalMeanWarning)`.

    Remedy: compute the loss with `tpudist.compute_average_loss(per_example_loss)`, and sum the
    gradients over the replicas.
    """


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`: how it compiles and calls a replica function.

    The `experimental_` fields come from `tf.distribute.RunOptions`; tpudist adds the others.

    Attributes:
        experimental_enable_dynamic_batch_size: Accepted for `tf.distribute`; False gives a warning.
            Partial batches are padded to one static shape and masked (see `PerReplica.rows`).
        experimental_bucketizing_dynamic_shape: Must stay False: shapes are static.
        experimental_xla_options: Compiler options by name, passed to XLA unchanged. Stored as
            pairs.
        donate_argnums: Positions of positional arguments whose arrays the call may overwrite. You
            must not use these arrays afterwards.
        static_argnums: Positions of positional arguments whose Python numbers become part of the
            program, as in `jax.jit`. The program is compiled once for each value. By default,
            integers and floats are arrays in the function, unless it turns out to need the Python
            number (for a shape, in `if` or `range`). Booleans are always static.
        donate_state: Whether the call may overwrite in place the old values of NNX objects and
            Variables that the function changes. Arrays that you read from them before the call are
            then deleted.
        aggregation: Rules that combine state in plain pytrees when it differs between replicas:
            a dict from the name of a collection to a `tpudist.VariableAggregation`, its name,
            `"max"`, `"min"`, or `"none"`, which keeps one value for each replica. The rules apply
            to state that the function takes as an argument and returns, such as Linen's
            collections, and to state that it returns under the name of a collection
            (`{"batch_stats": ...}`). An NNX Variable uses the name of its type
            (`{"MetricState": "max"}`). The default rule is `{"batch_stats": "mean"}`. State without
            a rule becomes a `PerReplica`. But if `params` or `opt_state` are returned next to an
            integer, such as the number of the step, they are a state, and raise an error if they
            differ. Without an integer they may be gradients, which are nested alike. The value
            `"none"` without a dict keeps one value for each replica of all such state, and of all
            NNX Variables that differ: these then hold a `PerReplica`. Stored as pairs.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
    donate_argnums: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    static_argnums: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    donate_state: bool = dataclasses.field(default=True, kw_only=True)
    aggregation: Any = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self):
        """Checks the fields and makes them hashable."""
        object.__setattr__(self, "aggregation", _check_aggregation(self.aggregation))
        for name in ("donate_argnums", "static_argnums"):
            object.__setattr__(self, name, _check_positions(name, vars(self)[name]))
        if self.experimental_xla_options is not None:
            pairs = tuple(sorted(dict(self.experimental_xla_options).items()))
            object.__setattr__(self, "experimental_xla_options", pairs)
        if not self.experimental_enable_dynamic_batch_size:
            warn_if_given(
                "RunOptions(experimental_enable_dynamic_batch_size",
                self.experimental_enable_dynamic_batch_size,
                "shapes are static, and partial batches are padded and counted exactly",
            )
        if self.experimental_bucketizing_dynamic_shape:
            raise ValueError(
                "RunOptions(experimental_bucketizing_dynamic_shape=True) is not supported: every "
                "replica function is compiled for static shapes. Distribute the dataset with "
                "tpudist, which pads the last batch and counts only its real rows."
            )


def shorten(value: object) -> str:
    """Returns the `repr` of a value for a message, or only its type if the `repr` is long."""
    text = repr(value)
    return text if len(text) <= _MAX_REPR and "\n" not in text else f"<{type(value).__name__}>"


_Rule = str | enum.Enum
_Rules = _Rule | Mapping[str, _Rule] | Iterable[tuple[str, _Rule]] | None


def _check_aggregation(rules: _Rules) -> tuple[tuple[str, str], ...]:
    """Returns pairs of the name of a collection and the name of its aggregation."""
    if isinstance(rules, str | enum.Enum):
        rules = {ALL_COLLECTIONS: rules}
    checked = []
    for collection, rule in sorted(dict(rules or ()).items()):
        # A `VariableAggregation`, which this layer cannot import, or the name of one.
        name = (rule.name if isinstance(rule, enum.Enum) else str(rule)).lower()
        known = ("none",) if collection == ALL_COLLECTIONS else _AGGREGATIONS
        if name not in known or not isinstance(collection, str):
            raise ValueError(
                f"RunOptions(aggregation={shorten(rules)}): aggregation must map the names of "
                f"collections to a tpudist.VariableAggregation or its name "
                f"({', '.join(_AGGREGATIONS)}). For example: {{'batch_stats': 'mean'}}."
            )
        checked.append((collection, name))
    return tuple(checked)


def _check_positions(name: str, value: object) -> tuple[int, ...]:
    positions = (value,) if isinstance(value, int) else value
    if not isinstance(positions, tuple | list) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in positions
    ):
        raise TypeError(
            f"RunOptions({name}={shorten(value)}): {name} must hold positions of arguments. Pass a "
            f"tuple of integers, such as (1,)."
        )
    return tuple(positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MutualTLS:
    """Certificates with which the processes of a run authenticate each other.

    They protect the service in the first process, through which processes report who is present,
    who has left, and the keys of checkpoints. Without certificates, that service trusts everyone
    who reaches its port. They do not encrypt the traffic between devices, which uses other
    connections.

    Requires jax 0.12. The files are read again from time to time, so you can renew certificates.

    Attributes:
        cert_file: Path of this process's certificate chain, PEM.
        key_file: Path of its private key, PEM.
        ca_file: Path of the certificates of the authorities that must have signed the certificates
            of other processes, PEM.
        peer_uri_prefix: Required prefix of a URI in the certificates of other processes, such as
            "spiffe://example.org/" (with the slash). None compares the host name in the first
            process's certificate with its address.
    """

    cert_file: str
    key_file: str
    ca_file: str
    peer_uri_prefix: str | None = None


class InputReplicationMode(enum.Enum):
    """Number of calls of a dataset function; matches `tf.distribute.InputReplicationMode`.

    Attributes:
        PER_WORKER: One call in each process, whose replicas take batches from its dataset in turn.
        PER_REPLICA: One call for each replica, which has its own dataset.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.Enum):
    """Policy by which several processes share one dataset; matches `tf.data`'s `AutoShardPolicy`.

    With one process there is nothing to share. Under the first three policies, give all processes
    the same dataset; a step then reads the same examples with any number of processes.

    Attributes:
        AUTO: Same as `DATA`.
        FILE: Same as `DATA`, in an order in which each process reads few files. Requires a dataset
            of files.
        DATA: Each process takes the rows of its own replicas. Examples that can be read by number
            are read once. If the dataset is an iterable, every process reads and decodes all
            batches.
        OFF: The dataset of each process holds different data, batched by the global batch size, and
            each replica takes one part of its process's batches in turn.
        HINT: Same as `OFF`; `dataset.shard(SHARD_HINT, SHARD_HINT)` makes the data differ.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class PartialBatch(enum.Enum):
    """Policy for a batch that has fewer rows than the global batch.

    Attributes:
        PAD: The default. The batch is padded to the full shape, and `PerReplica.rows` has the
            numbers of real rows. If you pass it explicitly, batches for one replica are padded too,
            and are PerReplica values. Otherwise they are plain arrays, and each size is a new
            shape.
        SHRINK: A batch of b rows is split into parts of ceil(b / n) rows for n replicas, as in
            TensorFlow. The step is compiled again for this shape. Full batches are split in the
            same way.
        DROP: The batch is skipped.
        ERROR: The batch raises a `ValueError`.
    """

    PAD = "pad"
    SHRINK = "shrink"
    DROP = "drop"
    ERROR = "error"

    @classmethod
    def of(cls, value: "PartialBatch | str | None") -> "PartialBatch":
        """Returns the policy of this name; PAD for None.

        Raises:
            ValueError: If no policy has this name.
        """
        try:
            return cls.PAD if value is None else cls(value)
        except ValueError:
            known = ", ".join(repr(policy.value) for policy in cls)
            raise ValueError(
                f"partial_batch={shorten(value)}: it must be one of {known}."
            ) from None


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """Options for distributing a dataset; matches `tf.distribute.InputOptions`.

    Attributes:
        experimental_fetch_to_device: Whether batches wait for their step on the devices or, if
            False, in host memory, from which the step takes them. None, the default, means True.
        experimental_replication_mode: Whether `distribute_datasets_from_function` calls its
            function once per process or once per replica.
        experimental_place_dataset_on_device: Accepted with a warning: datasets are read on the
            host.
        experimental_per_replica_buffer_size: Maximum number of batches that wait. With 0, each
            batch is made when you request it.
        auto_shard_policy: Policy by which several processes share one dataset. It is a field here
            because datasets have no `tf.data.Options` in tpudist.
        partial_batch: Policy for a batch with fewer rows than the global batch; only in tpudist.
            None, the default, pads it. But a strategy with one replica then receives plain arrays
            of any size.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    experimental_prefetch_to_device: dataclasses.InitVar[bool | None] = dataclasses.field(
        default=None, kw_only=True
    )
    auto_shard_policy: AutoShardPolicy = dataclasses.field(
        default=AutoShardPolicy.AUTO, kw_only=True
    )
    partial_batch: PartialBatch | str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self, experimental_prefetch_to_device: bool | None):
        """Accepts the old name of `experimental_fetch_to_device`, and checks the values."""
        if experimental_prefetch_to_device is not None:
            warnings.warn(
                "InputOptions(experimental_prefetch_to_device) is deprecated: use "
                "experimental_fetch_to_device.",
                DeprecationWarning,
                stacklevel=3,
            )
            if self.experimental_fetch_to_device not in (None, experimental_prefetch_to_device):
                raise ValueError(
                    f"InputOptions(experimental_fetch_to_device="
                    f"{self.experimental_fetch_to_device}, experimental_prefetch_to_device="
                    f"{experimental_prefetch_to_device}): the two values differ, and the second "
                    f"is the old name of the first. Omit experimental_prefetch_to_device."
                )
        fetch = self.experimental_fetch_to_device
        if fetch is None:
            fetch = experimental_prefetch_to_device
        object.__setattr__(self, "experimental_fetch_to_device", fetch is None or bool(fetch))
        mode, size = self.experimental_replication_mode, self.experimental_per_replica_buffer_size
        if not isinstance(mode, InputReplicationMode):
            raise ValueError(
                f"InputOptions(experimental_replication_mode={mode!r}): it must be "
                f"InputReplicationMode.PER_WORKER or InputReplicationMode.PER_REPLICA."
            )
        if not isinstance(self.auto_shard_policy, AutoShardPolicy):
            raise ValueError(
                f"InputOptions(auto_shard_policy={self.auto_shard_policy!r}): it must be an "
                f"AutoShardPolicy: {', '.join(policy.name for policy in AutoShardPolicy)}."
            )
        if self.partial_batch is not None:
            object.__setattr__(self, "partial_batch", PartialBatch.of(self.partial_batch))
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"InputOptions(experimental_per_replica_buffer_size={size!r}): it must be an "
                f"integer of at least 0."
            )


class ValueContext:
    """Replica that a value is for; matches `tf.distribute.experimental.ValueContext`.

    Args:
        replica_id_in_sync_group: Number of the replica.
        num_replicas_in_sync: Number of replicas.
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1):
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync
