"""Steps that a process has read, which wait until all processes take them.

The processes agree on many steps in one round of messages. A thread makes the rounds while the loop
takes the steps of the round before, and another one reads. A slow dataset has read few steps by
then, so its steps are not delayed, and a fast one has read many, so there are few rounds.
"""

import collections
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Generic, Protocol, TypeVar

from tpudist.input.process_rounds import Rounds
from tpudist.input.transfer.prefetch import Prefetcher
from tpudist.processes.coordination import Cancelled

MOST_AHEAD = 64
"""Most steps that a process reads before they are agreed."""
# Bytes of the batches in each of four places, and at most one step more: read, announced, agreed,
# and taken by the loop. If the first steps are larger than half of it, all are read one by one.
_MOST_BYTES_AHEAD = 16 << 20


class Readable(Protocol):
    """A step that was read, or the end of the data in its place."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it occupies."""
        ...

    @property
    def is_end(self) -> bool:
        """Whether the data have ended."""
        ...


_Read = TypeVar("_Read", bound=Readable)


class WaitingReads(Generic[_Read]):
    """The steps that were read and that no process takes yet, and the end or the error after them.

    Attributes:
        steps: The steps, in their order.
        end: The end of the data after `steps`; None before it was read.
        failure: Error of the read after `steps`. All processes raise an error at that step.
    """

    def __init__(self) -> None:
        self.steps: collections.deque[_Read] = collections.deque()
        self.end: _Read | None = None
        self.failure: Exception | None = None
        self._reads: Iterator[_Read] = iter(())
        self._count_ready: Callable[[], int] = lambda: 0
        self._most_waiting = 1
        self._most_bytes: int | None = None

    def read_from(
        self,
        reads: Iterator[_Read],
        count_ready: Callable[[], int] = lambda: 0,
        most: int = 1,
        most_bytes: int | None = None,
    ) -> None:
        """Reads later steps from an iterator.

        Args:
            reads: The steps, and the end.
            count_ready: Returns how many of them need not be awaited.
            most: Most steps that may wait.
            most_bytes: Bytes of such steps after which no other one is taken; None for no limit.
        """
        self._reads, self._count_ready = reads, count_ready
        self._most_waiting, self._most_bytes = most, most_bytes

    def accept(self, read: _Read) -> None:
        """Adds a step, or the end."""
        if read.is_end:
            self.end = read
        else:
            self.steps.append(read)

    def read_more(self) -> None:
        """Waits for a step if none is waiting, and takes all steps that are read already."""
        while len(self.steps) < self._most_waiting and self.end is None and self.failure is None:
            if self.steps and (self._has_enough_bytes() or not self._count_ready()):
                return
            try:
                self.accept(next(self._reads))
            except StopIteration:
                # The reads end with an end. Without it, the thread that reads ahead was closed.
                raise Cancelled("the pass was closed") from None
            except Exception as error:
                self.failure = error

    def _has_enough_bytes(self) -> bool:
        most = self._most_bytes
        return most is not None and sum(x.num_bytes for x in self.steps) >= most

    def describe_failure(self) -> str:
        """Returns the text of `failure`; empty if there is none."""
        error = self.failure
        return "" if error is None else f"{type(error).__name__}: {error}"

    def take(self) -> _Read:
        """Removes the next step, on which all processes have agreed; the end if none is left."""
        if self.steps:
            return self.steps.popleft()
        assert self.end is not None, "a step was agreed that this process has not read"
        return self.end


class AgreedWindow(Protocol[_Read]):
    """Steps that all processes take."""

    @property
    def reads(self) -> list[_Read]:
        """The steps, as this process has read them."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether the pass ends after them."""
        ...


_Window = TypeVar("_Window", bound=AgreedWindow)
_WindowCo = TypeVar("_WindowCo", bound=AgreedWindow, covariant=True)


class AgreedWindows(Protocol[_Read, _WindowCo]):
    """Windows of one pass. Each `next` is one round; all processes make the same rounds.

    Attributes:
        waiting: The steps that no window has had yet.
    """

    waiting: WaitingReads[_Read]

    def __next__(self) -> _WindowCo: ...

    def __iter__(self) -> Iterator[_WindowCo]: ...


def take_windows(
    windows: AgreedWindows[_Read, _Window],
    reads: Iterator[_Read],
    rounds: Rounds,
    keep: Callable[[_Read], _Read] = lambda read: read,
) -> Generator[_Window, None, None]:
    """Yields all windows of a pass; reads and agrees on the next ones meanwhile.

    Args:
        windows: The windows.
        reads: The steps of this process that are not in `windows.waiting` yet, and the end.
        rounds: Channel for the messages of the pass.
        keep: Called with each step that is read ahead, before the next one is read; returns the
            step in memory that the dataset does not use again.
    """
    windows.waiting.read_from(reads)
    first = next(windows)
    is_large = any(2 * x.num_bytes > _MOST_BYTES_AHEAD for x in first.reads)
    if first.is_last or not rounds.reads_ahead or is_large:
        yield first
        yield from windows
        return
    for i, read in enumerate(first.reads):
        first.reads[i] = keep(read)
    # Two more threads: one reads, and one makes the round for the next window as soon as the steps
    # of the last one are taken from it.
    # Later steps may have more rows than the first, so their bytes are counted, too.
    reader = Prefetcher(
        map(keep, reads),
        MOST_AHEAD,
        max_bytes=_MOST_BYTES_AHEAD,
        count_bytes=lambda read: read.num_bytes,
    )
    windows.waiting.read_from(
        reader, lambda: reader.num_ready, MOST_AHEAD, most_bytes=_MOST_BYTES_AHEAD
    )
    agreed = Prefetcher(windows, 1)
    wait_for_threads = False
    try:
        for window in itertools.chain([first], agreed):
            yield window
            if window.is_last:
                return
        raise Cancelled("the pass was closed")
    except GeneratorExit:
        # The dataset may be read again at once, so no thread may read it any more.
        wait_for_threads = True
        raise
    finally:
        for thread in (reader, agreed):
            thread.close(0)
        for thread in (reader, agreed) if wait_for_threads else ():
            thread.close()
