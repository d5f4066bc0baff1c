"""Notice: any process can announce that the run must end, and all learn it within about 0.3 s."""

import atexit
import dataclasses
import datetime
import json
import math
import weakref
from collections.abc import Callable

from tpudist.processes.coordination import Board
from tpudist.processes.host import Event, this_host

INTERVAL_S = 0.25
"""Seconds between two looks for a notice in a small run."""
_READS_PER_S = 500  # that process 0 can answer: with more processes, each reads less often


def look_interval_s(num_processes: int) -> float:
    """Returns the seconds between two looks of each process."""
    # Twice as many processes at one service would make each read wait longer, so the interval grows
    # with their number: 1,000 processes read every 2.25 s.
    return INTERVAL_S + num_processes / _READS_PER_S


@dataclasses.dataclass(frozen=True)
class Content:
    """The content of a notice.

    Attributes:
        process: Index of the process that must end.
        why: Source of the notice, such as "SIGTERM".
        grace_s: Seconds from the notice to the end.
        when: Time of the notice, as a text.
    """

    process: int
    why: str
    grace_s: float
    when: str

    def __str__(self) -> str:
        return f"process {self.process} must end: {self.why} ({self.when})"


class Notice:
    """One notice that the run must end. If several processes give notice, the first one counts.

    If there are several processes, a thread looks for a notice up to four times a second.

    Args:
        name: Name of the notice, the same in all processes and unique in the run.
        on_known: Called once in that thread when there is a notice, with an event that is set if
            the notice is closed meanwhile. Not called if there is only one process.

    Attributes:
        board: Board on which the notice is posted.
        content: Content of the notice; None while there is none.
        given_at_s: Time at which this process gave notice, by `time.monotonic`.
    """

    def __init__(self, name: str, on_known: Callable[[Event], None] | None = None):
        self.board = Board(name)
        self.content: Content | None = None
        self.given_at_s = math.inf
        self._given: Content | None = None
        # Read here, because JAX takes a lock for it, which `give` must not do in a signal handler.
        self._process = this_host().process_index()
        self._on_known = on_known
        self._closing = this_host().event()
        self._thread = None
        if self.board.num_processes > 1:
            self._thread = this_host().start_thread(self._watch, name=f"notice {name}")

    def give(self, why: str, grace_s: float = 0.0) -> None:
        """Gives notice for this process, unless there is one already.

        Any thread and any signal handler may call this: it takes no lock and does not wait.
        """
        # It only sets attributes; the thread posts them. In one process there is no thread.
        if self._given is not None or self.content is not None:
            return
        self.given_at_s = this_host().monotonic()
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        self._given = Content(self._process, why, grace_s, now)
        if self._thread is None:
            self.content = self._given

    @property
    def is_from_this_process(self) -> bool:
        """Whether this process must end, and not another one."""
        return self.content is not None and self.content == self._given

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        if self._thread is not None and not this_host().is_current(self._thread):
            self._thread.join()

    def _watch(self) -> None:
        interval_s = look_interval_s(self.board.num_processes)
        while not self._closing.wait(interval_s):
            try:
                # The board keeps the first notice, and all read that one, also its author.
                if self._given is not None:
                    self.board.post("notice", json.dumps(dataclasses.asdict(self._given)))
                text = self.board.read("notice")
                if text is None:
                    continue
                self.content = Content(**json.loads(text))
                if self._on_known is not None:
                    self._on_known(self._closing)
            except ConnectionError:  # temporary; at the end of the run, the notice is closed
                continue
            return


def close_with(owner: object, close: Callable[[bool], None]) -> Callable[[], object]:
    """Calls `close` once: when `owner` is deleted, when Python ends, or when the result is called.

    Args:
        owner: Object whose end closes.
        close: Called with whether Python ends. It must not refer to `owner`.
    """
    finalizer = weakref.finalize(owner, close, False)
    # Exit handlers run in reverse order. JAX leaves the other processes in a handler that was
    # registered when it connected, so ours, which still needs them, runs before. weakref has one
    # handler for all finalizers, which may have been registered earlier.
    finalizer.atexit = False

    def at_exit() -> None:
        if finalizer.detach() is not None:
            close(True)

    atexit.register(at_exit)
    return finalizer
