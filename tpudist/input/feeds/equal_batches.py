"""Compares the batches of an iterable that all processes have, before they take their rows of them.

All processes must have the same batches, and nobody knows how many. So each process announces the
rows, dtypes and shapes of all batches that it has read, in one round of messages (`waiting_reads`).
All take the batches before the first difference, and raise an error in its place.
"""

import contextlib
import functools
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from tpudist.input.feeds.waiting_reads import WaitingReads, take_windows
from tpudist.input.iterator_state import State
from tpudist.input.process_rounds import Rounds, expand, group
from tpudist.input.transfer.to_devices import Parts
from tpudist.options.member_names import format_values

# The part of a batch for this process, and the state after it; None for a batch that is dropped.
HostElement: TypeAlias = tuple[Parts, State] | None

_END = "no more batch"  # in place of a description


class ReadBatch(NamedTuple):
    """A batch that this process has read.

    Attributes:
        element: See `HostElement`.
        description: Rows, dtypes and shapes of the element; must be equal in all processes.
        num_bytes: Bytes of memory that it occupies.
    """

    element: HostElement
    description: str
    num_bytes: int

    @property
    def is_end(self) -> bool:
        """Whether it stands for the end of the data."""
        return self.description == _END

    def keep(self) -> "ReadBatch":
        """Returns the batch in memory that the dataset does not use again."""
        if self.element is None:
            return self
        parts, state = self.element
        return self._replace(element=(parts.keep(), state))


def take_equal(
    batches: Iterator[ReadBatch], rounds: Rounds, first_index: int
) -> Generator[HostElement, None, None]:
    """Yields the elements of a pass, after comparing each with the batches of the other processes.

    Args:
        batches: Batches of this process.
        rounds: Channel for the comparison.
        first_index: Number of the first of these batches in the pass.

    Raises:
        ValueError: If the batches of two processes differ in rows, shapes or dtypes, or one has
            fewer batches.
        RuntimeError: If the iterable of another process fails.
    """
    reads = itertools.chain(batches, [ReadBatch(None, _END, 0)])
    windows = take_windows(EqualWindows(rounds, first_index), reads, rounds, ReadBatch.keep)
    with rounds.leave_on_error(), contextlib.closing(windows):
        for window in windows:
            for read in window.reads:
                if not read.is_end:
                    yield read.element


class _EqualWindow(NamedTuple):
    """Batches that are equal in all processes; see `waiting_reads.AgreedWindow`."""

    reads: list[ReadBatch]

    @property
    def is_last(self) -> bool:
        return self.reads[-1].is_end


class EqualWindows(Iterator[_EqualWindow]):
    """The windows of one pass; see `waiting_reads.AgreedWindows`.

    Invariant: All processes have the same `_number` before a round, because it follows from the
    answers. Each process then announces at least one batch, or the end, or an error. So either a
    batch is agreed, or the pass ends with an error in all processes.
    """

    def __init__(self, rounds: Rounds, number: int):
        self._rounds, self._number = rounds, number
        self._is_over = False
        self.waiting = WaitingReads[ReadBatch]()

    def __next__(self) -> _EqualWindow:
        if self._is_over:
            raise StopIteration
        self.waiting.read_more()
        self._rounds.step = self._number
        compare = functools.partial(_compare, self._rounds.processes)
        answer = self._rounds.combine(self._announce(), compare)
        self._check(answer)
        window = _EqualWindow([self.waiting.take() for _ in range(answer["num_batches"])])
        self._number += len(window.reads)
        self._is_over = window.is_last
        return window

    def _announce(self) -> dict[str, Any]:
        end = [] if self.waiting.end is None else [self.waiting.end]
        descriptions = (x.description for x in (*self.waiting.steps, *end))
        runs = [(len(list(same)), text) for text, same in itertools.groupby(descriptions)]
        return {"runs": runs, "failure": self.waiting.describe_failure()}

    def _check(self, answer: dict[str, Any]) -> None:
        """Raises the error of an answer, if it has one."""
        if answer["failures"]:
            if self.waiting.failure is not None and not self.waiting.steps:
                raise self.waiting.failure
            self._rounds.raise_failure(dict(answer["failures"]))
        if answer["different"]:
            raise ValueError(
                f"The processes differ in batch {self._number} of the dataset: "
                f"{answer['different']}. All must receive the same batches, from which each takes "
                "its own rows. If each process has its own data, use AutoShardPolicy.OFF, or "
                "distribute_datasets_from_function."
            )


def _compare(processes: Sequence[int], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many of the announced batches are equal, or the difference in the first one."""
    different, owners = group(messages)
    texts = [[text for count, text in x["runs"] for _ in range(count)] for x in different]
    most = min(map(len, texts))
    equal = next((i for i in range(most) if any(x[i] != texts[0][i] for x in texts)), most)
    answer = {"num_batches": equal, "failures": [], "different": ""}
    numbers = expand(owners)
    if not most:  # a process has read nothing, because its dataset failed
        pairs = zip(processes, (different[i] for i in numbers), strict=True)
        answer["failures"] = [(i, x["failure"]) for i, x in pairs if not x["runs"]]
    elif not equal:
        found = dict(zip(processes, (texts[i][0] for i in numbers), strict=True))
        answer["different"] = format_values("process", found)
    return answer
