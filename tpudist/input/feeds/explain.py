"""What each process reads of a dataset, why, and what it reads in vain: a table.

Nothing is read to say it, but for the first batch of an iterable, and nothing is communicated.
"""

import dataclasses
from typing import Any

import numpy as np

from tpudist.input.feeds.auto_shard import Sharding, name_of
from tpudist.input.feeds.per_replica_batches import Pipelines
from tpudist.input.feeds.split_batches import SplitBatches
from tpudist.input.rows_of_replicas import Assignment
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.options import PartialBatch
from tpudist.xla.mesh import ReplicaMesh

_MANY = 1_000_000  # examples whose files are not counted one by one


@dataclasses.dataclass(frozen=True)
class Host:
    """What one process reads; None for what is not known.

    Attributes:
        process: Which.
        replicas: Those that it feeds.
        files: From how many files; None also if there are none.
        examples_per_step: How many examples of a full batch its replicas take.
        examples_per_epoch: How many of an epoch.
        in_vain_per_step: How many more it reads, and decodes, in a step.
    """

    process: int
    replicas: tuple[int, ...]
    files: int | None
    examples_per_step: int | None
    examples_per_epoch: int | None
    in_vain_per_step: int | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a dataset is shared out; `str` of it is a table, and so it is to `rich`.

    Attributes:
        source: What kind of dataset it is.
        policy: By which policy, in words.
        why: Why, and what it costs.
        partial_batch: What becomes of a batch with fewer rows.
        global_batch_size: Examples of a full step over all replicas, if it is known.
        hosts: What each process reads.
    """

    source: str
    policy: str
    why: str
    partial_batch: str
    global_batch_size: int | None
    hosts: tuple[Host, ...]

    @property
    def line(self) -> str:
        """All of it in one line."""
        hosts = "; ".join(
            f"process {host.process} has {_describe_host(host)}" for host in self.hosts
        )
        return f"{self.source}: {self.policy} ({self.why}); {hosts}."

    def _facts(self) -> list[tuple[str, str]]:
        size = _cell(self.global_batch_size)
        return [
            ("dataset", self.source),
            ("sharding", f"{self.policy}: {self.why}"),
            ("global batch", size),
            ("partial batch", self.partial_batch),
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        return [
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

    def __str__(self) -> str:
        facts = [f"{name + ':':<15}{value}" for name, value in self._facts()]
        table = [_HEADINGS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in table
        ]
        return "\n".join([*facts, *lines])

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(title="\n".join(f"{name}: {value}" for name, value in self._facts()))
        for heading in _HEADINGS:
            table.add_column(heading, justify="right")
        for row in self._rows():
            table.add_row(*row)
        return table


_HEADINGS = ("process", "replicas", "files", "examples/step", "examples/epoch", "in vain/step")


def explain(dataset: Any) -> Explanation:
    """How a `DistributedDataset` is shared out over processes and replicas.

    Raises:
        TypeError: It is none.
    """
    give = getattr(dataset, "explanation", None)
    if give is None:
        raise TypeError(
            f"A {type(dataset).__name__} is not distributed, so there is nothing to explain. Pass "
            "the result of strategy.experimental_distribute_dataset."
        )
    return give(read=True)


def explain_feed(
    feed: SplitBatches | Pipelines, mesh: ReplicaMesh, sharding: Sharding | None, *, read: bool
) -> Explanation:
    """How a feed is shared out; its first batch may be read for it, if `read`."""
    policy = "each has its own"
    if sharding is not None:
        policy = "not shared" if sharding.policy is None else sharding.policy.name
    if isinstance(feed, Pipelines):
        own = feed.source
        return Explanation(
            own,
            policy,
            sharding.why if sharding else "a function made the datasets, one by one",
            PartialBatch.PAD.value,
            None,
            tuple(
                Host(process, replicas, None, None, None, 0)
                for process, replicas in _replicas(mesh).items()
            ),
        )
    assert sharding is not None, feed
    size = feed.global_batch_size(read=read)
    return Explanation(
        name_of(feed.source),
        policy,
        sharding.why,
        feed.partial_batch.value,
        size,
        tuple(_host(feed, mesh, size, *item) for item in _replicas(mesh).items()),
    )


def _host(
    feed: SplitBatches, mesh: ReplicaMesh, size: int | None, process: int, replicas: tuple[int, ...]
) -> Host:
    if size is None:
        return Host(process, replicas, None, None, None, None)
    each = feed.assignment(size, size)
    per_step = sum(each.quotas[i] for i in replicas)
    source = feed.source
    if not isinstance(source, IndexedDataset):
        return Host(process, replicas, None, per_step, None, size - per_step)
    full, left_over = _batches(source)
    per_epoch = full * per_step
    if left_over:
        tail = feed.assignment(left_over, size)
        per_epoch += sum(tail.rows(left_over)[i] for i in replicas)
    files = None
    if source.num_files is not None and source.num_examples <= _MANY:
        files = _num_files(source, feed, size, replicas)
    return Host(process, replicas, files, per_step, per_epoch, 0)


def _batches(source: IndexedDataset) -> tuple[int, int]:
    """How many full batches an epoch has, and how many rows one that is not full has."""
    numbers, size = source.batches_of_epoch, source.global_batch_size or 1
    if not numbers:
        return 0, 0
    rows_of_last = min(size, source.num_examples - numbers[-1] * size)
    return (len(numbers), 0) if rows_of_last == size else (len(numbers) - 1, rows_of_last)


def _num_files(
    source: IndexedDataset, feed: SplitBatches, size: int, replicas: tuple[int, ...]
) -> int | None:
    taken = []
    for numbers in source.numbers_of_epoch():
        each: Assignment = feed.assignment(len(numbers), size)
        rows = each.rows(len(numbers))
        taken += [numbers[each.start(i) :][: rows[i]] for i in replicas]
    return source.num_files_of(np.concatenate(taken))


def _replicas(mesh: ReplicaMesh) -> dict[int, tuple[int, ...]]:
    """The replicas that each process feeds."""
    fed: dict[int, list[int]] = {}
    for replica in range(mesh.num_replicas):
        for process in sorted({device.process_index for device in mesh.devices_of(replica)}):
            fed.setdefault(process, []).append(replica)
    return {process: tuple(replicas) for process, replicas in sorted(fed.items())}


def _cell(value: int | None, unknown: str = "?") -> str:
    return unknown if value is None else str(value)


def _describe_host(host: Host) -> str:
    known = (
        (host.examples_per_step, "examples of each step"),
        (host.examples_per_epoch, "of an epoch"),
        (host.files, "files"),
    )
    told = [f"{number} {what}" for number, what in known if number is not None]
    return ", ".join([f"replicas {_span(host.replicas)}", *told])


def _span(replicas: tuple[int, ...]) -> str:
    in_sequence = replicas == tuple(range(replicas[0], replicas[-1] + 1))
    if len(replicas) > 2 and in_sequence:
        return f"{replicas[0]}-{replicas[-1]}"
    return ", ".join(map(str, replicas))
