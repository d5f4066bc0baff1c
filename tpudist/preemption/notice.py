"""Notice: any process can announce that the run must end, and all learn it within about 0.3 s.

A thread of each process waits in the coordination service for the first text of the notice, so all
threads wake when it is written. Nothing else ends such a wait early. So a process that closes its
notice writes that text, too. From then on, the others look for a later notice from time to time.

| key | writer | meaning |
|---|---|---|
| `first` | the first process that gives notice or closes | the notice, or `closed` |
| `later` | the first process that gives notice after that | the notice, if `first` is `closed` |
"""

import atexit
import contextlib
import dataclasses
import datetime
import json
import math
import weakref
from collections.abc import Callable

from tpudist.processes.board import Board
from tpudist.processes.host import Event, this_host

INTERVAL_S = 0.25
"""Seconds between two requests of a process in a small run, while there is no notice."""
_READS_PER_S = 500  # that process 0 can answer: with more processes, each reads less often


_FIRST, _LATER, _CLOSED = "first", "later", "closed"


def look_interval_s(num_processes: int) -> float:
    """Returns the seconds between two requests of each process, while there is no notice."""
    # Twice as many processes at one service would make each request wait longer, so the interval
    # grows with their number: 1,000 processes ask every 2.25 s.
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

    If there are several processes, one thread waits for the notice, and one writes it.

    Args:
        name: Name of the notice, the same in all processes and unique in the run.
        on_known: Called once in the first thread when there is a notice, with an event that is set
            if the notice is closed meanwhile. Not called if there is only one process.

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
        self._interval_s = look_interval_s(self.board.num_processes)
        self._has_closed_one = False  # whether a process closed before there was a notice
        self._threads = [
            this_host().start_thread(run, name=f"notice {name}")
            for run in (self._watch, self._write_given)
            if self.board.num_processes > 1
        ]

    def give(self, why: str, grace_s: float = 0.0) -> None:
        """Gives notice for this process, unless there is one already.

        Any thread and any signal handler may call this: it takes no lock and does not wait.
        """
        # It only sets attributes; a thread writes them. In one process there is no thread.
        if self._given is not None or self.content is not None:
            return
        self.given_at_s = this_host().monotonic()
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        self._given = Content(self._process, why, grace_s, now)
        if not self._threads:
            self.content = self._given

    @property
    def is_from_this_process(self) -> bool:
        """Whether this process must end, and not another one."""
        return self.content is not None and self.content == self._given

    def close(self) -> None:
        """Ends the threads."""
        self._closing.set()
        if self._threads and self.content is None:
            with contextlib.suppress(ConnectionError):
                self.board.post(_FIRST, _CLOSED)
        for thread in self._threads:
            if not this_host().is_current(thread):
                thread.join()

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                text = self._wait_for_text()
                if text is not None:
                    self.content = Content(**json.loads(text))
                    if self._on_known is not None:
                        self._on_known(self._closing)
                    return
            except ConnectionError:  # temporary; at the end of the run, the notice is closed
                self._closing.wait(self._interval_s)

    def _wait_for_text(self) -> str | None:
        """Returns the text of the notice, the same one in all processes; None after a while."""
        if not self._has_closed_one:
            # A wait is two requests, so it takes two intervals.
            text = self.board.wait_for(_FIRST, 2 * self._interval_s)
            if text != _CLOSED:
                return text
            self._has_closed_one = True
        return None if self._closing.wait(self._interval_s) else self.board.read(_LATER)

    def _write_given(self) -> None:
        # `give` may run in a signal handler, so it cannot wake this thread.
        while not self._closing.wait(INTERVAL_S) and self.content is None:
            if self._given is not None:
                text = json.dumps(dataclasses.asdict(self._given))
                with contextlib.suppress(ConnectionError):
                    # If the first text is a notice of another process, nobody reads a later one.
                    if not self.board.post(_FIRST, text):
                        self.board.post(_LATER, text)
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
