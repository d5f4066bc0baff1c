"""A notice that the run is to end: given in any process, known in all of them soon after."""

import atexit
import dataclasses
import datetime
import json
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax

from tpudist.processes.coordination import Board

INTERVAL_S = 0.25
_READS_PER_S = 500


@dataclasses.dataclass(frozen=True)
class Content:
    """What a notice says.

    Attributes:
        process: The index of the process that is to end.
        why: What told it so.
        grace_s: Seconds from then to its end.
        when: As people write it.
    """

    process: int
    why: str
    grace_s: float
    when: str

    def __str__(self) -> str:
        return f"process {self.process} must end: {self.why} ({self.when})"


class Notice:
    """That the run is to end; of several processes' notices the first counts, for all of them.

    Where there are several processes a thread asks for it up to four times a second.

    Attributes:
        content: What it says; None as long as there is none.
        given_at_s: When this process gave its own, by `time.monotonic`.
    """

    def __init__(self, name: str, on_known: Callable[[threading.Event], Any] | None = None):
        """All processes must make theirs with the same name, which no other has.

        Args:
            name: Of the notice.
            on_known: Called in the thread once, when there is a notice, with an event that is set
                when it is closed meanwhile. In one process it is not called.
        """
        self.board = Board(name)
        self.content: Content | None = None
        self.given_at_s = math.inf
        self._own: Content | None = None
        # Asked for here: JAX takes a lock for it, which a signal handler must not.
        self._process = jax.process_index()
        self._on_known = on_known
        self._closing = threading.Event()
        self._thread = None
        if self.board.num_processes > 1:
            self._thread = threading.Thread(target=self._watch, name=f"notice {name}", daemon=True)
            self._thread.start()

    def give(self, why: str, grace_s: float = 0.0) -> None:
        """Gives notice in the name of this process, unless there is one.

        Any thread and any signal handler may call this: it takes no lock and waits for nobody.
        """
        if self._own is not None or self.content is not None:
            return
        self.given_at_s = time.monotonic()
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        self._own = Content(self._process, why, grace_s, now)
        if self._thread is None:
            self.content = self._own

    @property
    def is_from_this_process(self) -> bool:
        """Whether it is this process that is to end."""
        return self.content is not None and self.content == self._own

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        # Process 0 answers all of them.
        interval_s = INTERVAL_S + self.board.num_processes / _READS_PER_S
        while not self._closing.wait(interval_s):
            try:
                # The first one that is posted is kept; all read that, its author too.
                if self._own is not None:
                    self.board.post("notice", json.dumps(dataclasses.asdict(self._own)))
                text = self.board.read("notice")
                if text is None:
                    continue
                self.content = Content(**json.loads(text))
                if self._on_known is not None:
                    self._on_known(self._closing)
            except ConnectionError:  # for the moment; or the run has ended, and then this is closed
                continue
            return


def close_with(owner: Any, close: Callable[[bool], Any]) -> Callable[[], Any]:
    """Has `close` called once: when `owner` is forgotten, when Python ends, or by the result.

    It is told whether Python ends. That is before JAX leaves the other processes, which it does at
    the end too: what was registered first comes last.
    """
    finalizer = weakref.finalize(owner, close, False)
    finalizer.atexit = False  # weakref's turn may come after JAX's

    def at_exit() -> None:
        if finalizer.detach() is not None:
            close(True)

    atexit.register(at_exit)
    return finalizer
