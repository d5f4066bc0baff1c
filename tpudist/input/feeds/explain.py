"""Table of the data that each process reads of a dataset, and of the reasons.

It communicates nothing, and reads nothing except the first batch of an iterable.
"""

import dataclasses

import numpy as np

from tpudist.display.text_tables import Column, TextTable
from tpudist.input.feeds.auto_shard import Division
from tpudist.input.feeds.per_replica_batches import WholeBatches
from tpudist.input.feeds.split_batches import SplitBatches
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.options import PartialBatch
from tpudist.xla.mesh import ReplicaMesh

# A dataset with more examples has no column of files: finding the file of each takes too long.
_MAX_EXAMPLES = 1_000_000


@dataclasses.dataclass(frozen=True)
class Host:
    """The data that one process reads. Unknown numbers are None.

    Attributes:
        process: Index of the process.
        replicas: Replicas that it feeds.
        files: Number of files; None also without files.
        examples_per_step: Number of examples of a full batch for its replicas.
        examples_per_epoch: Number of examples of an epoch for its replicas.
        in_vain_per_step: Number of further examples that it reads and decodes in a step.
    """

    process: int
    replicas: tuple[int, ...]
    files: int | None = None
    examples_per_step: int | None = None
    examples_per_epoch: int | None = None
    in_vain_per_step: int | None = None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The division of a dataset among processes. `str` and `rich` show it as a table.

    Attributes:
        source: Kind of the dataset.
        policy: Policy of the division, as text.
        why: Reason and cost of the policy.
        partial_batch: Treatment of a batch with fewer rows.
        global_batch_size: Examples of a full step over all replicas, if known.
        hosts: Data that each process reads.
    """

    source: str
    policy: str
    why: str
    partial_batch: str
    global_batch_size: int | None
    hosts: tuple[Host, ...]

    @property
    def line(self) -> str:
        """The contents in one line."""
        hosts = "; ".join(
            f"process {host.process} has {_describe_host(host)}" for host in self.hosts
        )
        return f"{self.source}: {self.policy} ({self.why}); {hosts}."

    def __str__(self) -> str:
        return str(self._table())

    def __rich__(self) -> TextTable:
        return self._table()

    def _table(self) -> TextTable:
        facts = {
            "dataset": self.source,
            "sharding": f"{self.policy}: {self.why}",
            "global batch": _cell(self.global_batch_size),
            "partial batch": self.partial_batch,
        }
        rows = [
            (
                str(host.process),
                _span(host.replicas),
                _cell(host.files, "-"),
                _cell(host.examples_per_step),
                _cell(host.examples_per_epoch),
                _cell(host.in_vain_per_step),
            )
            for host in self.hosts
        ]
        width = max(map(len, facts)) + 2
        title = "\n".join(f"{name + ':':<{width}}{value}" for name, value in facts.items())
        return TextTable(_COLUMNS, rows, title)


_COLUMNS = tuple(
    Column(name, is_number=True)
    for name in (
        "process",
        "replicas",
        "files",
        "examples/step",
        "examples/epoch",
        "in vain/step",
    )
)


def explain(dataset: object) -> Explanation:
    """Returns the division of a `DistributedDataset` among processes and replicas.

    Raises:
        TypeError: If `dataset` is not a `DistributedDataset`.
    """
    # By attribute, because the module of `DistributedDataset` imports this one.
    explanation = getattr(dataset, "explanation", None)
    if explanation is None:
        raise TypeError(
            f"A {type(dataset).__name__} is not distributed, so there is nothing to explain. Pass "
            "the result of strategy.experimental_distribute_dataset."
        )
    return explanation(read=True)


def explain_feed(
    feed: SplitBatches | WholeBatches, mesh: ReplicaMesh, division: Division | None, *, read: bool
) -> Explanation:
    """Returns the explanation of a feed. If `read`, it may read the first batch."""
    policy = "each has its own"
    if division is not None:
        policy = "not shared" if division.policy is None else division.policy.name
    if isinstance(feed, WholeBatches):
        own = feed.source
        return Explanation(
            own,
            policy,
            division.why if division else "a function made the datasets, one by one",
            PartialBatch.PAD.value,
            None,
            tuple(
                Host(process, replicas, in_vain_per_step=0)
                for process, replicas in _replicas(mesh).items()
            ),
        )
    assert division is not None, feed
    size = feed.global_batch_size(read=read)
    return Explanation(
        feed.source.name,
        policy,
        division.why,
        feed.partial_batch.value,
        size,
        tuple(_host(feed, mesh, size, *item) for item in _replicas(mesh).items()),
    )


def _host(
    feed: SplitBatches, mesh: ReplicaMesh, size: int | None, process: int, replicas: tuple[int, ...]
) -> Host:
    if size is None:
        return Host(process, replicas)
    quotas = feed.assignment(size, size).quotas
    per_step = sum(quotas[i] for i in replicas)
    source = feed.source
    if not isinstance(source, IndexedDataset):
        return Host(process, replicas, examples_per_step=per_step, in_vain_per_step=size - per_step)
    num_full, rows_of_last = _batches(source)
    per_epoch = num_full * per_step
    if rows_of_last:
        rows = feed.assignment(rows_of_last, size).rows(rows_of_last)
        per_epoch += sum(rows[i] for i in replicas)
    files = None
    if source.num_files is not None and source.num_examples <= _MAX_EXAMPLES:
        files = _num_files(source, feed, size, replicas)
    return Host(process, replicas, files, per_step, per_epoch, 0)


def _batches(source: IndexedDataset) -> tuple[int, int]:
    """Returns the number of full batches of an epoch, and the rows of a partial last batch."""
    numbers, size = source.batches_of_epoch, source.global_batch_size or 1
    if not numbers:
        return 0, 0
    rows_of_last = min(size, source.num_examples - numbers[-1] * size)
    return (len(numbers), 0) if rows_of_last == size else (len(numbers) - 1, rows_of_last)


def _num_files(
    source: IndexedDataset, feed: SplitBatches, size: int, replicas: tuple[int, ...]
) -> int | None:
    taken = []
    for numbers in source.numbers_of_first_epoch():
        assignment = feed.assignment(len(numbers), size)
        rows = assignment.rows(len(numbers))
        taken += [numbers[assignment.start(i) :][: rows[i]] for i in replicas]
    return source.num_files_of(np.concatenate(taken)) if taken else 0


def _replicas(mesh: ReplicaMesh) -> dict[int, tuple[int, ...]]:
    """Returns the replicas that each process feeds."""
    replicas_of: dict[int, list[int]] = {}
    for replica in range(mesh.num_replicas):
        for process in sorted({device.process_index for device in mesh.devices_of(replica)}):
            replicas_of.setdefault(process, []).append(replica)
    return {process: tuple(replicas) for process, replicas in sorted(replicas_of.items())}


def _cell(value: int | None, unknown: str = "?") -> str:
    return unknown if value is None else str(value)


def _describe_host(host: Host) -> str:
    numbers = (
        (host.examples_per_step, "examples of each step"),
        (host.examples_per_epoch, "of an epoch"),
        (host.files, "files"),
    )
    known = [f"{number} {label}" for number, label in numbers if number is not None]
    return ", ".join([f"replicas {_span(host.replicas)}", *known])


def _span(replicas: tuple[int, ...]) -> str:
    in_sequence = replicas == tuple(range(replicas[0], replicas[-1] + 1))
    if len(replicas) > 2 and in_sequence:
        return f"{replicas[0]}-{replicas[-1]}"
    return ", ".join(map(str, replicas))
