"""Options for distributing a dataset: its split between processes, and its partial batches."""

import dataclasses
import enum
import warnings

from tpudist.options.messages import shorten


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
            batch is made when you request it. Otherwise several processes that have their own
            datasets of unknown lengths read more of them, up to 64 MiB, to agree on many steps at
            once.
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
