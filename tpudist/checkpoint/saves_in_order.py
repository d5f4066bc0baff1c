"""Writes one step after another in the background, and says what went wrong between two steps."""

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import jax

from tpudist import step_boundaries
from tpudist.checkpoint import lost_saves, manifest
from tpudist.checkpoint.directory import Directory
from tpudist.checkpoint.entries import Path
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.one_save import Barrier, Save
from tpudist.checkpoint.retention import Retention
from tpudist.checkpoint.steps_on_disk import History

_in_flight: weakref.WeakValueDictionary[str, Save] = weakref.WeakValueDictionary()


def finish_other(directory: str) -> None:
    """Waits for what another manager of this program writes to `directory`, as if it were there."""
    other = _in_flight.get(directory)
    if other is not None:
        other.join()


class Saver:
    """The saves of one manager."""

    def __init__(
        self,
        files: Directory,
        history: History,
        retention: Retention,
        barrier: Barrier,
        timeout_s: float,
    ):
        """Into `files`, of which `retention` says what is kept when a step has been added."""
        self._files = files
        self._history = history
        self._retention = retention
        self._barrier = barrier
        self._timeout_s = timeout_s
        self._writer: Any = None
        self._save: Save | None = None
        self._step = -1
        self._remarks: list[str] = []
        self._is_listening = False

    def begin(self, step: int, arrays: Mapping[Path, Any], contents: Mapping[str, Any]) -> None:
        """Copies the arrays, and goes on in the background."""
        if self._writer is None:
            from tpudist.checkpoint.arrays import Writer  # Orbax takes a while to import

            barrier = self._barrier if jax.process_count() > 1 else None
            self._writer = Writer(self._before_commit, barrier, self._timeout_s)
        self._step = step
        self._history.remember(step, contents)
        try:
            self._writer.begin(self._files.step(step), arrays, contents)
        except BaseException as error:  # Ctrl-C too
            self._abandon()
            self._after_save(step, error)
            failure = self._failure(step, error)
            if isinstance(error, Exception):
                raise failure from error
            raise
        directory, wait = str(self._files), self._writer.wait
        self._save = Save(step, directory, wait, lambda error: self._after_save(step, error))
        _in_flight[str(self._files)] = self._save
        if not self._is_listening:
            self._is_listening = True
            step_boundaries.register(self._warn)

    def check(self) -> None:
        """Raises what went wrong in a save that has ended."""
        if self._save is not None and self._save.is_done:
            self._finish()

    def wait(self) -> None:
        """Waits until the save that goes on has ended; raises what went wrong."""
        if self._save is not None:
            self._save.join()
            self._finish()

    def close(self) -> None:
        """Waits, and ends what runs in the background."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _abandon(self) -> None:
        """Lets go of a writer that was interrupted, which may go on with its step."""
        writer, self._writer = self._writer, None
        try:
            writer.close()
        except Exception:  # of the step that is given up
            pass

    def _before_commit(self) -> None:
        """In the background, in process 0, when all files have been written."""
        manifest.write(self._files.path_to_write(self._step))

    def _after_save(self, step: int, error: BaseException | None) -> None:
        """In the background, in every process, when a save has ended."""
        self._barrier.finish_round(error)  # first: the others may be waiting for this process
        if jax.process_index():
            return
        if error is not None:
            self._files.remove_unfinished()
            return
        times, metrics = self._history.times(), self._history.metrics()
        steps = self._history.steps()
        for old in self._retention.steps_to_remove(steps, times, metrics, newest=step):
            try:
                self._files.remove(old)
            except OSError as error:
                self._remarks.append(
                    f"Could not delete the old checkpoint {self._files.step(old)}: {error}. It "
                    f"still uses disk space. Delete it manually."
                )

    def _warn(self) -> None:
        """Between two steps, and when a save has ended."""
        while self._remarks:
            warnings.warn(self._remarks.pop(), stacklevel=5)
        save = self._save
        if save is not None and save.is_done and save.error is not None and not save.was_told:
            save.was_told = True
            warnings.warn(str(self._failure(save.step, save.error)), stacklevel=4)

    def _finish(self) -> None:
        save, self._save = self._save, None
        self._warn()
        if save is not None and save.error is not None:
            lost_saves.forget_raised(str(self._files))
            raise self._failure(save.step, save.error) from save.error

    def _failure(self, step: int, error: BaseException) -> CheckpointError:
        self._history.forget(step)
        latest = self._history.latest()
        good = (
            "No earlier checkpoint exists. "
            if latest is None
            else f"The last checkpoint is of step {latest}. "
        )
        return make_failure(f"of step {step} could not be saved to {self._files}", error, good)


def make_failure(what: str, error: BaseException, good: str) -> CheckpointError:
    """Returns the error of a checkpoint that was not written: `what` failed, and what is `good`."""
    return CheckpointError(
        f"The checkpoint {what}: {type(error).__name__}: {_shorten(error)}\n{good}The partial "
        f"files of this checkpoint were deleted. Free disk space or repair the directory, then "
        f"save again."
    )


def _shorten(error: BaseException) -> str:
    """Orbax quotes a whole source location after what happened."""
    text = str(error)
    return text if len(text) < 600 else f"{text[:600]}..."
