"""One save, from the copy in memory to the commit, and what becomes of it if it fails."""

import concurrent.futures.thread  # so that its hook comes before ours, and runs after it
import threading
from collections.abc import Callable

import jax

from tpudist.checkpoint import lost_saves
from tpudist.processes.coordination import TIMEOUT_S, Channel

_unfinished: "set[Save]" = set()


class Save:
    """A save that goes on in the background.

    Attributes:
        step: Its number.
        error: Why it failed, once it has.
        was_told: Whether somebody has been warned of that.
    """

    def __init__(
        self,
        step: int,
        directory: str,
        wait: Callable[[], None],
        after: Callable[[BaseException | None], None],
    ):
        """Waits in a thread for the write to end.

        Args:
            step: Its number.
            directory: Directory of the step.
            wait: Returns when the step is committed, and raises if it will not be.
            after: Called then, in the same thread, with what was raised.
        """
        self.step = step
        self.error: BaseException | None = None
        self.was_told = False
        self._directory = directory
        self._wait = wait
        self._after = after
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
            text = f"{type(error).__name__}: {error}"[:600]
            lost_saves.note(self._directory, f"Step {self.step} in {self._directory}: {text}")
        _unfinished.discard(self)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Waits until it has ended."""
        self._thread.join()


def _finish_all() -> None:
    """When the program ends without having waited: later, no thread could start another one."""
    for save in list(_unfinished):
        save.join()


# No public hook runs before Python stops its thread pools, which Orbax writes with. Python 3.12.0
# and 3.12.1 start no thread any more when it runs: `lost_saves` reports a save that fails.
getattr(threading, "_register_atexit", lambda _: None)(_finish_all)
assert concurrent.futures.thread


class Barrier:
    """Where the background threads of all processes wait for each other, twice in each save.

    One whose part failed says so here, and all fail with its words: nobody waits for it.
    """

    def __init__(self, name: str):
        """All processes use the same name, and no other barrier has it."""
        self._channel = Channel(name)
        self._rounds = 0
        self._someone_is_missing = False

    def __call__(self, key: str, timeout_ms: int) -> None:
        """Waits for the others. As Orbax calls it."""
        self._rounds += 1
        self._someone_is_missing = True
        answers = self._channel.exchange("", timeout_s=timeout_ms / 1000)
        self._someone_is_missing = False
        self._raise_others(answers)

    def finish_round(self, error: BaseException | None) -> None:
        """Called when a save has ended: tells those who wait that it has failed here."""
        # What went wrong is said in place of the barrier that the others are at, or come to. Not
        # after the last one, when nobody waits any more; nor where somebody did not come to one: to
        # wait for them again would take as long again.
        failed_here = error is not None and not isinstance(error, FailedElsewhere)
        others_wait = self._rounds < _ROUNDS and not self._someone_is_missing
        if failed_here and others_wait and jax.process_count() > 1:
            self._channel.exchange(f"{type(error).__name__}: {error}", timeout_s=TIMEOUT_S)
        self._rounds = 0

    def _raise_others(self, answers: list[str]) -> None:
        failed = [f"process {i}: {answer}" for i, answer in enumerate(answers) if answer]
        if failed:
            raise FailedElsewhere("; ".join(failed))


_ROUNDS = 2  # all has been written; process 0 has committed it


class FailedElsewhere(RuntimeError):
    """Another process could not do its part."""
