"""Windows of steps that all processes take, each agreed in one round of messages."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax

from tpudist.input.feeds import padding_examples, step_announcements
from tpudist.input.feeds.batch import Batch, Step, count_rows
from tpudist.input.feeds.empty_pass import warn_of_empty_pass
from tpudist.input.feeds.states_of_processes import PassStates
from tpudist.input.feeds.step_announcements import Announcement, Verdict
from tpudist.input.feeds.step_counts import ReplicaOrder
from tpudist.input.feeds.waiting_reads import WaitingReads
from tpudist.input.iterator_state import HasState, State
from tpudist.input.process_rounds import Rounds
from tpudist.xla.mesh import ReplicaMesh


class Read(NamedTuple):
    """A step that this process has read.

    Attributes:
        step: Batches of this process's replicas.
        example: One row of its first batch; None after the end of the data.
        states: Positions of this process's datasets after it.
    """

    step: Step
    example: Batch | None
    states: list[State]

    @property
    def num_bytes(self) -> int:
        """Bytes of its batches."""
        return sum(x.nbytes for batch in self.step if batch is not None for x in batch.leaves)

    @property
    def is_end(self) -> bool:
        """Whether this process has no more data."""
        return self.example is None


class Window(NamedTuple):
    """Steps that all processes take.

    Attributes:
        reads: The steps, as this process has read them.
        rows: Rows of all replicas in each step.
        example: Example that another process has sent for padding; None if none was needed.
        drops: Whether a step in which a replica has no batch is dropped.
        is_last: Whether the pass ends after them.
    """

    reads: list[Read]
    rows: list[tuple[int, ...]]
    example: Batch | None
    drops: bool
    is_last: bool


class ReadingFeed(Protocol):
    """The part of a feed that `read_steps` and `Windows` use.

    Attributes:
        example: One row of the first batch of the last step that was read; None before it.
    """

    example: Batch | None

    @property
    def drops_incomplete_steps(self) -> bool:
        """Whether a step is dropped if a replica has no batch in it."""
        ...


def read_steps(
    feed: ReadingFeed, mesh: ReplicaMesh, steps: Iterator[Step], passes: Sequence[HasState]
) -> Iterator[Read]:
    """Yields the steps of this process, then an end without batches."""
    # The positions are read before the next step is.
    for step in steps:
        yield Read(step, feed.example, [x.get_state() for x in passes])
    yield Read([None] * len(mesh.local_replicas), None, [x.get_state() for x in passes])


class Windows(Iterator[Window]):
    """The windows of one pass; each `next` is one round, and all processes make the same rounds.

    Invariants: All processes have the same `_number` and `_description` before a round, because
    both follow from verdicts. `waiting` has the steps from `_number` on that this process has
    read. In each round it has at least one step, or the end, or an error to announce, so either a
    step is agreed, or the pass ends with an error in all processes.

    Args:
        feed: The feed of this process.
        order: The places of all replicas.
        first: The first step that this process has read.
        rounds: Channel for the messages of the pass.
        states: Receives the positions of this process, unless it can compute them.
        number: Number of the first step.

    Attributes:
        waiting: Steps of this process that are not agreed.
    """

    def __init__(
        self,
        feed: ReadingFeed,
        order: ReplicaOrder,
        first: Read,
        rounds: Rounds,
        states: PassStates,
        number: int,
    ):
        self._feed = feed
        self._order = order
        self._rounds = rounds
        self._states = states
        self._number = number
        self._num_posted = number  # steps whose positions are posted
        self._description: str | None = None
        self.waiting = WaitingReads[Read]()
        self.waiting.accept(first)
        self._is_over = False

    def __next__(self) -> Window:
        if self._is_over:
            raise StopIteration
        self.waiting.read_more()
        rounds, number = self._rounds, self._number
        rounds.step = number
        if self._states.counts is None:
            self._post()
        answer = rounds.combine(self._announce(), functools.partial(_judge, self._description))
        verdict = cast(Verdict, answer)
        self._check(verdict)
        example = self._receive_example(verdict["sender"])
        rows = list(step_announcements.rows_of_steps(verdict, self._order))
        if verdict["ended"] and not verdict["num_steps"] and not number:
            warn_of_empty_pass(self._feed)
        self._description = verdict["description"]
        self._is_over = verdict["ended"] or len(rows) < verdict["num_steps"]
        if self._states.counts is None:
            self._states.end_round(number + verdict["num_announced"])
            if rounds.is_first:
                self._states.remove_before(verdict["oldest"])
        reads = [self._take() for _ in rows]
        return Window(reads, rows, example, verdict["drops"], self._is_over)

    def _announce(self) -> dict[str, Any]:
        steps: list[tuple[Sequence[int], str]] = []
        for read in self.waiting.steps:
            assert read.example is not None, read
            steps.append((count_rows(read.step), read.example.description))
        announcement: Announcement = {
            "runs": step_announcements.runs_of(steps),
            "replicas": self._order.count_replicas(self._position),
            "ended": self.waiting.end is not None,
            "failure": self.waiting.describe_failure(),
            "drops": self._feed.drops_incomplete_steps,
            "oldest": self._states.oldest,
        }
        return dict(announcement)

    @property
    def _position(self) -> int:
        return self._rounds.processes.index(jax.process_index())

    def _post(self) -> None:
        waiting, first = self.waiting, self._num_posted
        new = [read.states for read in waiting.steps][first - self._number :]
        self._num_posted = self._number + len(waiting.steps)
        if waiting.end is not None:
            new.append(waiting.end.states)
        if new:
            self._states.post(first, new, ended=waiting.end is not None)

    def _check(self, verdict: Verdict) -> None:
        """Raises the error of a verdict, if it has one."""
        processes = self._rounds.processes
        if "errors" in verdict:
            if self.waiting.failure is not None and not self.waiting.steps:
                raise self.waiting.failure
            self._rounds.raise_failure({processes[i]: text for i, text in verdict["errors"]})
        if "different" in verdict:
            difference = step_announcements.describe_difference(processes, verdict["different"])
            raise ValueError(
                f"The processes have batches of different kinds: {difference}. Each replica takes "
                "one part of the same element. In one step they may differ only in the number of "
                "rows."
            )

    def _receive_example(self, sender: int | None) -> Batch | None:
        """Returns the example that a process sends, if this one needs it."""
        if sender is None:
            return None
        is_sender = self._position == sender
        own = self.waiting.steps[0].example if is_sender else None
        encoded = None if own is None else padding_examples.encode_batch(own)
        answer = self._rounds.combine(
            {"example": encoded}, lambda messages: {"example": messages[sender]["example"]}
        )
        if self.waiting.steps:
            return None
        example = padding_examples.decode_batch(answer["example"], self._rounds.processes[sender])
        if self._feed.example is None:
            self._feed.example = example
        return example

    def _take(self) -> Read:
        self._number += 1
        return self.waiting.take()


def _judge(description: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(step_announcements.judge(cast(list[Announcement], messages), description))
