"""Table of the data that each process reads of a dataset, and of the reasons.

It communicates nothing, and reads nothing except the first batch of an iterable.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tpudist.display.text_tables import Column, TextTable
from tpudist.input.feeds.auto_shard import Division
from tpudist.input.feeds.per_replica_batches import WholeBatches
from tpudist.input.feeds.split_batches import SplitBatches
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.options import PartialBatch
from tpudist.options.member_names import format_members, format_numbers
from tpudist.xla.mesh import ReplicaMesh

# A dataset with more examples has no column of files: finding the file of each takes too long.
_MAX_EXAMPLES = 1_000_000
_MAX_ROWS = 5  # of the table


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
        hosts = "; ".join(_describe_hosts(*group) for group in _group(self.hosts))
        return f"{self.source}: {self.policy} ({self.why}); {hosts}."

    def __str__(self) -> str:
        return str(self._table())

    def __rich__(self) -> TextTable:
        return self._table()

    def _table(self) -> TextTable:
        facts = {
            "dataset": self.source,
            "sharding": f"{self.policy}: {self.why}",
            "global batch": _cell(self.global_batch_size, ""),
            "partial batch": self.partial_batch,
        }
        rows = [
            (
                format_numbers(processes),
                format_numbers(host.replicas),
                _cell(host.files, each, "-"),
                _cell(host.examples_per_step, each),
                _cell(host.examples_per_epoch, each),
                _cell(host.in_vain_per_step, each),
            )
            for processes, host in _group(self.hosts)
            for each in [" each" if len(processes) > 1 else ""]
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


def _cell(value: int | None, each: str, unknown: str = "?") -> str:
    return unknown if value is None else f"{value}{each}"


def _describe_hosts(processes: Sequence[int], host: Host) -> str:
    is_one = len(processes) == 1
    numbers = (
        (host.examples_per_step, "examples of each step"),
        (host.examples_per_epoch, "of an epoch"),
        (host.files, "files"),
    )
    each = "" if is_one else "each "
    known = [f"{each}{number} {label}" for number, label in numbers if number is not None]
    start = f"{format_members('process', processes)} {'has' if is_one else 'have'}"
    return ", ".join([f"{start} {format_members('replica', host.replicas)}", *known])


def _group(hosts: Sequence[Host]) -> list[tuple[list[int], Host]]:
    """Returns processes and what each of them reads, in at most `_MAX_ROWS` rows.

    Of many processes, those that read the same numbers are in one row, with the replicas of all.
    """
    if len(hosts) <= _MAX_ROWS:
        return [([host.process], host) for host in hosts]
    groups: dict[Host, list[Host]] = {}
    for host in hosts:
        groups.setdefault(dataclasses.replace(host, process=0, replicas=()), []).append(host)
    largest = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows, others = largest[:_MAX_ROWS], largest[_MAX_ROWS:]
    if others:
        # Their numbers differ, so the last row shows none.
        rest = [host for _, members in [*rows[-1:], *others] for host in members]
        rows = [*rows[:-1], (Host(0, ()), rest)]
    return [
        (
            [x.process for x in members],
            dataclasses.replace(host, replicas=tuple(i for x in members for i in x.replicas)),
        )
        for host, members in rows
    ]
