"""Windows of steps that all processes take, each agreed in one round of messages."""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax

from tpudist.input.feeds import padding_examples, step_announcements
from tpudist.input.feeds.batch import Batch, Step, count_rows
from tpudist.input.feeds.empty_pass import warn_of_empty_pass
from tpudist.input.feeds.states_of_processes import PassStates
from tpudist.input.feeds.step_announcements import Announcement, Verdict
from tpudist.input.feeds.step_counts import ReplicaOrder
from tpudist.input.iterator_state import HasState, State
from tpudist.input.process_rounds import Rounds
from tpudist.processes.coordination import Cancelled
from tpudist.xla.mesh import ReplicaMesh

MOST_AHEAD = 64
"""Most steps that a process reads before they are agreed."""


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
    """The windows of one pass; each `next` is one round, of which all processes make the same.

    Invariants: All processes have the same `_number` and `_description` before a round, because
    both follow from verdicts. `_waiting` has the steps from `_number` on that this process has
    read. In each round it has at least one step, or the end, or an error to announce, so either a
    step is agreed, or the pass ends with an error in all processes.

    Args:
        feed: The feed of this process.
        order: The places of all replicas.
        first: The first step that this process has read.
        rounds: Channel for the messages of the pass.
        states: Receives the positions of this process, unless it can compute them.
        number: Number of the first step.
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
        self._reads: Iterator[Read] = iter(())
        self._count_ready: Callable[[], int] = lambda: 0
        self._most_waiting = 1
        self._feed = feed
        self._order = order
        self._rounds = rounds
        self._states = states
        self._number = number
        self._num_posted = number  # steps whose positions are posted
        self._description: str | None = None
        self._waiting: collections.deque[Read] = collections.deque()
        self._end: Read | None = None
        self._failure: Exception | None = None
        self._is_over = False
        self._accept(first)

    def read_from(
        self, reads: Iterator[Read], count_ready: Callable[[], int] = lambda: 0, most: int = 1
    ) -> None:
        """Reads later steps from an iterator.

        Args:
            reads: The steps, and the end.
            count_ready: Returns how many of them need not be awaited.
            most: Most steps that may wait to be agreed.
        """
        self._reads, self._count_ready, self._most_waiting = reads, count_ready, most

    def __next__(self) -> Window:
        if self._is_over:
            raise StopIteration
        self._read_more()
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

    def _accept(self, read: Read) -> None:
        if read.example is None:
            self._end = read
        else:
            self._waiting.append(read)

    def _read_more(self) -> None:
        """Waits for a step if none is waiting, and takes those that are read already."""
        while (
            len(self._waiting) < self._most_waiting and self._end is None and self._failure is None
        ):
            if self._waiting and not self._count_ready():
                return
            try:
                self._accept(next(self._reads))
            except StopIteration:
                # The reads end with an end. Without it, the thread that reads ahead was closed.
                raise Cancelled("the pass was closed") from None
            except Exception as error:
                # It belongs to the step after those that wait. All processes raise it there.
                self._failure = error

    def _announce(self) -> dict[str, Any]:
        steps: list[tuple[Sequence[int], str]] = []
        for read in self._waiting:
            assert read.example is not None, read
            steps.append((count_rows(read.step), read.example.description))
        error = self._failure
        announcement: Announcement = {
            "runs": step_announcements.runs_of(steps),
            "replicas": self._order.count_replicas(self._position),
            "ended": self._end is not None,
            "failure": "" if error is None else f"{type(error).__name__}: {error}",
            "drops": self._feed.drops_incomplete_steps,
            "oldest": self._states.oldest,
        }
        return dict(announcement)

    @property
    def _position(self) -> int:
        return self._rounds.processes.index(jax.process_index())

    def _post(self) -> None:
        first, end = self._num_posted, self._number + len(self._waiting)
        new = [read.states for read in self._waiting][first - self._number :]
        self._num_posted = end
        if self._end is not None:
            new.append(self._end.states)
        if new:
            self._states.post(first, new, ended=self._end is not None)

    def _check(self, verdict: Verdict) -> None:
        """Raises the error of a verdict, if it has one."""
        processes = self._rounds.processes
        if "errors" in verdict:
            if self._failure is not None and not self._waiting:
                raise self._failure
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
        own = self._waiting[0].example if is_sender else None
        encoded = None if own is None else padding_examples.encode_batch(own)
        answer = self._rounds.combine(
            {"example": encoded}, lambda messages: {"example": messages[sender]["example"]}
        )
        if self._waiting:
            return None
        example = padding_examples.decode_batch(answer["example"], self._rounds.processes[sender])
        if self._feed.example is None:
            self._feed.example = example
        return example

    def _take(self) -> Read:
        self._number += 1
        if self._waiting:
            return self._waiting.popleft()
        assert self._end is not None, "a step was agreed that this process has not read"
        return self._end


def _judge(description: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(step_announcements.judge(cast(list[Announcement], messages), description))
