"""One save in the background, from the copy in memory to the commit, and its failure.

The order of events on the disk is described in `arrays.Writer`.
"""

import concurrent.futures.thread  # registers its hook before ours, so it runs after ours
import contextlib
import json
import threading
from collections.abc import Callable

import jax

from tpudist.checkpoint import lost_saves
from tpudist.options.member_names import format_values
from tpudist.processes.coordination import TIMEOUT_S, Channel

_unfinished: "set[Save]" = set()
_ROUNDS = 2  # of `Barrier` in a save: all files are written; process 0 has committed the step
_MAX_ERROR_LENGTH = 600  # Orbax appends a long source location


class Save:
    """A save that runs in the background.

    Args:
        step: Number of the step.
        directory: Directory of the step.
        wait: Called in a thread; returns when the step is committed, and raises if it fails.
        after: Called in the same thread with the error of `wait`, or None.

    Attributes:
        step: Number of the step.
        error: Error of the save, after it has failed.
        is_reported: Whether a warning or an exception has reported the error.
    """

    def __init__(
        self,
        step: int,
        directory: str,
        wait: Callable[[], None],
        after: Callable[[BaseException | None], None],
    ):
        self.step = step
        self.error: BaseException | None = None
        self.is_reported = False
        self._directory = directory
        self._wait = wait
        self._after = after
        # Not a daemon: Python must not end while it writes.
        self._thread = threading.Thread(target=self._run, name=f"tpudist-checkpoint-{step}")
        _unfinished.add(self)
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._wait()
        except BaseException as e:  # the main thread raises it
            error = e
        try:
            self._after(error)
        except BaseException as e:
            error = error or e
        self.error = error
        if error is None:
            lost_saves.forget(self._directory)
        else:
            text = f"Step {self.step} in {self._directory}: {describe_error(error)}"
            lost_saves.note(self._directory, text)
        # Last: `_finish_all` waits until the failure is recorded.
        _unfinished.discard(self)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Waits until it has ended, with or without an error."""
        self._thread.join()


def describe_error(error: BaseException) -> str:
    """Returns the class and the beginning of the message of an error."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _MAX_ERROR_LENGTH else f"{text[:_MAX_ERROR_LENGTH]}..."


def _finish_all() -> None:
    for save in list(_unfinished):
        save.join()


# A program may end while a save runs. Exit handlers run too late for it: Python has then stopped
# its thread pools, with which Orbax writes, and no thread can start another one. No public hook
# runs before that. In Python 3.12.0 and 3.12.1 no thread can start when this hook runs, either;
# then `lost_saves` reports the save.
getattr(threading, "_register_atexit", lambda _: None)(_finish_all)  # private in Python
assert concurrent.futures.thread  # keeps the import, which is there for its effect


class Barrier:
    """A barrier for the background threads of all processes, which they meet twice in each save.

    A process whose part failed sends its error in place of the next barrier. Then all processes
    raise it, and nobody waits for a process that does not come.

    Args:
        name: Name of the barrier, the same in all processes and unique in the run.
    """

    def __init__(self, name: str):
        self._channel = Channel(name)
        self._rounds = 0
        self._last_round_failed = False

    def meet(self, text: str, timeout_s: float) -> list[str]:
        """Waits for the other processes, and returns the texts of all to process 0.

        Only process 0 needs them, so the others receive none.

        Raises:
            FailedElsewhere: If the save failed in another process.
        """
        self._rounds += 1
        self._last_round_failed = True  # until the round returns without a timeout
        texts, failures = self._exchange(text, "", timeout_s)
        self._last_round_failed = False
        if failures:
            raise FailedElsewhere(failures)
        return texts

    def finish_round(self, error: BaseException | None) -> None:
        """Ends a save, and sends its error to the processes that wait in the barrier.

        Raises nothing if they do not answer: the error of the save is the one to report.
        """
        # The rounds of a channel must stay in step, so a failed process takes part in the one round
        # that the others are in, or will come to. There is none after the second round. And if a
        # process was missing in a round, it would be missing again: that would take a second
        # timeout.
        failed_here = error is not None and not isinstance(error, FailedElsewhere)
        others_wait = self._rounds < _ROUNDS and not self._last_round_failed
        self._rounds = 0
        if failed_here and others_wait and jax.process_count() > 1:
            with contextlib.suppress(Exception):
                self._exchange("", f"{type(error).__name__}: {error}", TIMEOUT_S)

    def _exchange(self, text: str, error: str, timeout_s: float) -> tuple[list[str], str]:
        """Returns the texts of all processes, in process 0, and the failures, in all."""
        texts: list[str] = []

        def collect(messages: list[str]) -> str:
            answers = [json.loads(x) for x in messages]
            texts.extend(text for text, _ in answers)
            return format_values("process", {i: x for i, (_, x) in enumerate(answers) if x})

        failures = self._channel.combine(json.dumps([text, error]), collect, timeout_s=timeout_s)
        return texts, failures


class FailedElsewhere(RuntimeError):
    """The save failed in another process."""
