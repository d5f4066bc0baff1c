"""ProgramGeneration: one generation of a run, as a process that belongs to it sees it."""

from collections.abc import Callable, Mapping
from typing import Any

from tpudist.preemption.survival.survivor import Copies, Link
from tpudist.processes.host import Thread, this_host


class ProgramGeneration(Link):
    """A generation, between the main thread and the thread that runs the program.

    The supervisor ends a generation between two steps in two rounds: every process reports its
    commit (`pause`), and then all run up to the same last commit (`stop_at`).

    Args:
        number: Number of the generation.
        commit: Commit with whose state the generation begins.
        send: Called with a message to the supervisor.
        copies: Copies of the program's state.

    Attributes:
        number: Number of the generation.
        copies: Copies of the program's state.
        thread: Thread that runs the program; None before it starts.
        has_unwound: Whether the program has stopped at the end of a generation.
    """

    def __init__(
        self,
        number: int,
        commit: int,
        send: Callable[[Mapping[str, Any]], None],
        copies: Copies,
    ):
        self.number = number
        self.copies = copies
        self.thread: Thread | None = None
        self.has_unwound = False
        self._send = send
        # The newest commit that the program has passed, or with whose state it began. It may be in
        # the step that leads to the next.
        self._commit = commit
        self._is_pausing = False
        self._last: int | None = None
        # Guards these three, `is_over` and `ends_all`. `Survivor` reads the two without it: a value
        # that is out of date costs one more step, which is discarded.
        self._changed = this_host().condition()

    def is_last(self, commit: int) -> bool:
        """Whether the generation ends with a commit; waits while that is being agreed on."""
        with self._changed:
            # Ends with `stop_at` or `end`. The supervisor decides by the reports of all processes,
            # which their main threads send: no process needs to take a step for that.
            while self._last is None and self._is_pausing and not self.is_over:
                self._changed.wait(0.2)  # Python can raise in this thread only between waits
            self._commit = commit
            return self._last is not None and commit >= self._last

    def pause(self) -> None:
        """Reports the present commit; the next one waits until the last commit is known."""
        # Reports at once, not at the next commit. The program may be in a step that the others
        # reach only if they continue: one of them that waits in its next commit would wait for a
        # report that never comes.
        with self._changed:
            self._is_pausing = True
            self._send({"paused": self.number, "commit": self._commit})

    def stop_at(self, commit: int, ends_all: bool) -> None:
        """Declares the last commit of the generation."""
        with self._changed:
            self._last, self.ends_all = commit, ends_all
            self._changed.notify_all()

    def end(self) -> None:
        """Ends the generation at once."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()
