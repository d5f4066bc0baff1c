"""Options of calls, as frozen dataclasses, and warnings that are switched off by their class."""

import dataclasses
import enum
import warnings
from typing import Any


def warn_if_given(what: str, value: Any, why: str) -> None:
    """Warns that `what`, a parameter of `tf.distribute`, was given a value that has no effect."""
    if value is not None:
        warnings.warn(f"{what}={shorten(value)}) has no effect: {why}.", stacklevel=3)


def warn_of_deprecation(name: str, instead: str, *, stacklevel: int = 3) -> None:
    """Warns that `name` is deprecated, at the line that uses it, and says what to do `instead`."""
    warnings.warn(f"{name} is deprecated: {instead}.", DeprecationWarning, stacklevel=stacklevel)


def warn_of_op_arguments(what: str, use_locking: bool, name: str | None) -> None:
    """Warns that what describes an operation of a TensorFlow graph was given to method `what`."""
    if use_locking:
        warnings.warn(
            f"{what}(use_locking={use_locking!r}) has no effect: steps run one at a time.",
            stacklevel=3,
        )
    if name is not None:
        warnings.warn(f"{what}(name={name!r}) has no effect: nothing is named.", stacklevel=3)


class UndistributedBatchWarning(UserWarning):
    """Replicas add up what each of them has computed from the same array of the host.

    Each replica is given the whole of a NumPy array, or of a `jax.Array` of one device or that a
    sharding splits by rows, that is an argument of `Strategy.run`: n replicas do the work of one n
    times, and a sum over them (an optimizer's, `all_reduce`) is n times that of one, unless it is
    divided by n as a mean is. It is given once for a function, with the line of the call, if all of
    this holds:

    - the array has a dim 0 of more than one row;
    - no argument of the call is distributed, and the function captures no PerReplica;
    - what some `all_reduce` (by sum or mean) in it adds up depends on the array, and is equal on
      all replicas;
    - nothing that is added up or returned has the array's shape, as parameters and state would.

    So scalars, lookup tables beside a distributed batch, and arrays of which each replica takes its
    own rows are no reason; nor is a function that reduces nothing. Where replicas differ by their
    random numbers nothing is said either. To switch it off:
    `warnings.filterwarnings("ignore", category=tpudist.UndistributedBatchWarning)`.

    Remedy: give the array to a dataset that `experimental_distribute_dataset` distributes, so
    that each replica has its own rows.
    """


class LocalMeanWarning(UserWarning):
    """Warns of a step whose new state is not the state of one device with all rows.

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

    Remedy: `tpudist.compute_average_loss(per_example_loss)`, with summed gradients.
    """


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How `Strategy.run` compiles and calls a replica function.

    The `experimental_` fields are those of `tf.distribute.RunOptions`, the others are ours.

    Attributes:
        experimental_enable_dynamic_batch_size: Accepted for `tf.distribute`; partial batches are
            padded to one static shape and masked, so nothing is dynamic (see `PerReplica.rows`).
        experimental_bucketizing_dynamic_shape: Must stay False: shapes are static.
        experimental_xla_options: Compiler options by name, given to XLA as they are; kept as pairs.
        donate_argnums: Positions of positional arguments whose arrays the call may overwrite. They
            must not be used afterwards.
        static_argnums: Positions of positional arguments whose Python numbers are part of the
            program, which is compiled for each value, as in `jax.jit`. Without it integers and
            floats are arrays in the function, unless it turns out to need one as it is (for a
            shape, in `if` or `range`). Booleans are always static.
        donate_state: Whether the old values of NNX objects and Variables that the function changes
            may be overwritten in place. Arrays read from them before the call are then gone.
        aggregation: What becomes of state in plain pytrees, such as Linen's collections, that the
            function takes as an argument and gives back, or returns under the name of a collection
            (`{"batch_stats": ...}`), and that differs between replicas: by that name a
            `tpudist.VariableAggregation` or its name, `max` or `min`, or `none` for one value for
            each replica. NNX Variables have the names of their types (`{"MetricState": "max"}`). By
            default `{"batch_stats": "mean"}`; `params` and `opt_state` that are given back and
            differ are refused, if there is an integer beside them, such as the number of the step
            (gradients are nested alike), and state without a name here becomes a PerReplica. Just
            `"none"` keeps one value for each replica of all such state, and of all NNX Variables
            that differ: they hold a `PerReplica` then. Kept as pairs.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
    donate_argnums: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    static_argnums: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    donate_state: bool = dataclasses.field(default=True, kw_only=True)
    aggregation: Any = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self):
        """Refuses what cannot be honoured, and makes the fields hashable."""
        object.__setattr__(self, "aggregation", _check_aggregation(self.aggregation))
        for name in ("donate_argnums", "static_argnums"):
            object.__setattr__(self, name, _check_positions(name, getattr(self, name)))
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
                "RunOptions(experimental_bucketizing_dynamic_shape=True) was asked for, but every "
                "replica function is compiled for static shapes. Distribute the dataset with "
                "tpudist, which pads the last batch and counts only its real rows."
            )


def shorten(value: Any) -> str:
    """A value in a message: its `repr`, or only its type if that is long, as of a model."""
    text = repr(value)
    return text if len(text) <= _LONGEST and "\n" not in text else f"<{type(value).__name__}>"


_LONGEST = 120
ALL_COLLECTIONS = ""
"""The name in `RunOptions.aggregation` that stands for all state in plain pytrees."""

_AGGREGATIONS = ("none", "sum", "mean", "max", "min", "only_first_replica")


def _check_aggregation(rules: Any) -> tuple[tuple[str, str], ...]:
    """The names of the aggregations, by the names of collections."""
    if isinstance(rules, str) or hasattr(rules, "name"):
        rules = {ALL_COLLECTIONS: rules}
    checked = []
    for collection, rule in sorted(dict(rules or ()).items()):
        name = str(getattr(rule, "name", rule)).lower()
        known = ("none",) if collection == ALL_COLLECTIONS else _AGGREGATIONS
        if name not in known or not isinstance(collection, str):
            raise ValueError(
                f"RunOptions(aggregation={shorten(rules)}) was asked for. It says by the name of a "
                f"collection what becomes of it: a tpudist.VariableAggregation or its name "
                f"({', '.join(_AGGREGATIONS)}), as in {{'batch_stats': 'mean'}}."
            )
        checked.append((collection, name))
    return tuple(checked)


def _check_positions(name: str, value: Any) -> tuple[int, ...]:
    positions = (value,) if isinstance(value, int) else value
    if not isinstance(positions, tuple | list) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in positions
    ):
        raise TypeError(
            f"RunOptions({name}={shorten(value)}) names no positions of arguments. Give a tuple "
            f"of whole "
            f"numbers from 0, such as (1,)."
        )
    return tuple(positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MutualTLS:
    """Certificates with which the processes of a run prove to each other who they are.

    For what they tell each other through the first process (who is there, who has left, the keys of
    checkpoints): without it that service trusts whoever reaches its port. What devices send each
    other goes its own way, and is not encrypted by this.

    Needs jax 0.12. The files are read again from time to time, so certificates may be renewed.

    Attributes:
        cert_file: This process' chain of certificates, PEM.
        key_file: Its private key, PEM.
        ca_file: The certificates of the authorities that others' must be signed by, PEM.
        peer_uri_prefix: What a URI in the others' certificates must begin with, such as
            "spiffe://example.org/" (with the slash). None compares the name of the host in the
            first process' certificate with its address.
    """

    cert_file: str
    key_file: str
    ca_file: str
    peer_uri_prefix: str | None = None


class InputReplicationMode(enum.Enum):
    """How often a dataset function is called. As `tf.distribute.InputReplicationMode`.

    Attributes:
        PER_WORKER: Once in each process, whose replicas take batches from its dataset in turn.
        PER_REPLICA: Once for each replica, which has a dataset of its own.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.Enum):
    """How several processes share the reading of one dataset. As `tf.data`'s `AutoShardPolicy`.

    In one process nothing is shared out. Under the first three policies all processes are given the
    same dataset, and a step reads the same examples on any number of them.

    Attributes:
        AUTO: `DATA`.
        FILE: As `DATA`, in an order in which each process reads few files; for files only.
        DATA: Each process takes the rows of its own replicas. Examples that can be read by number
            are read once; of an iterable every process reads, and decodes, all batches.
        OFF: The dataset of each process holds other data, batched by the global batch size, and
            each replica takes one part of its process's batches in turn.
        HINT: As `OFF`, where `dataset.shard(SHARD_HINT, SHARD_HINT)` makes the data differ.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class PartialBatch(enum.Enum):
    """What becomes of a batch that has fewer rows than the global batch.

    Attributes:
        PAD: It is padded to the full shape, and its `PerReplica.rows` tell which rows are real.
            The default; but if it is asked for, so are batches for one replica, which are then
            PerReplica too: with plain arrays, each size is a shape of its own.
        SHRINK: Its b rows are split in parts of ceil(b / n) rows, as TensorFlow does: a shape of
            its own, for which a step is compiled once more. So are full batches.
        DROP: It is left out.
        ERROR: It is a `ValueError`.
    """

    PAD = "pad"
    SHRINK = "shrink"
    DROP = "drop"
    ERROR = "error"

    @classmethod
    def of(cls, value: "PartialBatch | str | None") -> "PartialBatch":
        """The policy of this name; PAD for None.

        Raises:
            ValueError: There is none.
        """
        try:
            return cls.PAD if value is None else cls(value)
        except ValueError:
            known = ", ".join(repr(policy.value) for policy in cls)
            raise ValueError(f"partial_batch is {shorten(value)}. Known are {known}.") from None


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a dataset is distributed. As `tf.distribute.InputOptions`.

    Attributes:
        experimental_fetch_to_device: Whether batches wait on the devices for their step (None, the
            default, is True), or in host memory, from which the step then takes them.
        experimental_replication_mode: How often the function of
            `distribute_datasets_from_function` is called.
        experimental_place_dataset_on_device: Accepted, with a warning: datasets are read on the
            host.
        experimental_per_replica_buffer_size: How many batches wait, at most; with 0 each is made
            when it is asked for.
        auto_shard_policy: How several processes share the reading of one dataset; ours, since the
            options of datasets are not `tf.data`'s here.
        partial_batch: What becomes of a batch with fewer rows than the global batch; ours. None,
            the default, pads it, but for one replica, which is given plain arrays of any size.
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
        """Takes the old name of `experimental_fetch_to_device`, and checks the values."""
        if experimental_prefetch_to_device is not None:
            warnings.warn(
                "InputOptions(experimental_prefetch_to_device) is deprecated: use "
                "experimental_fetch_to_device.",
                DeprecationWarning,
                stacklevel=3,
            )
            if self.experimental_fetch_to_device not in (None, experimental_prefetch_to_device):
                raise ValueError(
                    f"InputOptions was given experimental_fetch_to_device="
                    f"{self.experimental_fetch_to_device} and, by its old name, "
                    f"experimental_prefetch_to_device={experimental_prefetch_to_device}. Leave out "
                    f"the old one."
                )
        fetch = self.experimental_fetch_to_device
        fetch = experimental_prefetch_to_device if fetch is None else fetch
        object.__setattr__(self, "experimental_fetch_to_device", fetch is None or bool(fetch))
        mode, size = self.experimental_replication_mode, self.experimental_per_replica_buffer_size
        if not isinstance(mode, InputReplicationMode):
            raise ValueError(
                f"InputOptions(experimental_replication_mode={mode!r}) is no mode. Use "
                f"InputReplicationMode.PER_WORKER or InputReplicationMode.PER_REPLICA."
            )
        if not isinstance(self.auto_shard_policy, AutoShardPolicy):
            raise ValueError(
                f"InputOptions(auto_shard_policy={self.auto_shard_policy!r}) is no policy. Use one "
                f"of AutoShardPolicy: {', '.join(policy.name for policy in AutoShardPolicy)}."
            )
        if self.partial_batch is not None:
            object.__setattr__(self, "partial_batch", PartialBatch.of(self.partial_batch))
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"InputOptions(experimental_per_replica_buffer_size={size!r}) is no number of "
                f"batches. Give a whole number of at least 0."
            )


class ValueContext:
    """Which replica a value is for. As `tf.distribute.experimental.ValueContext`."""

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1):
        """For one replica of so many."""
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync
