"""BackgroundSaver: writes one step after another in the background, and reports the errors."""

import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tpudist import step_boundaries
from tpudist.checkpoint import lost_saves
from tpudist.checkpoint.directory import Directory
from tpudist.checkpoint.entries import ValuePath
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.one_save import Barrier, Save, describe_error
from tpudist.checkpoint.retention import Retention
from tpudist.checkpoint.steps_on_disk import StepsOnDisk

if TYPE_CHECKING:
    from tpudist.checkpoint.arrays import Writer  # Orbax takes a while to import

# Stack levels from `_warn` to the program, both from the iterator of its loop (a step boundary) and
# from `CheckpointManager.check`.
_OUTSIDE = 5

# Directory -> the save that writes to it. Two managers of one program may use one directory.
_in_flight: weakref.WeakValueDictionary[str, Save] = weakref.WeakValueDictionary()


def finish_other(directory: str) -> None:
    """Waits for a save of another manager of this program to `directory`; ignores its error."""
    other = _in_flight.get(directory)
    if other is not None:
        other.join()


class BackgroundSaver:
    """The saves of one manager, one at a time.

    Args:
        files: Directory of the steps.
        on_disk: Steps of the directory.
        retention: Rules by which old steps are deleted after each save.
        barrier: Barrier of the background threads of all processes.
        timeout_s: Maximum seconds for one save.
    """

    def __init__(
        self,
        files: Directory,
        on_disk: StepsOnDisk,
        retention: Retention,
        barrier: Barrier,
        timeout_s: float,
    ):
        self._files = files
        self._on_disk = on_disk
        self._retention = retention
        self._barrier = barrier
        self._timeout_s = timeout_s
        self._writer: Writer | None = None
        self._save: Save | None = None
        self._warnings: list[str] = []
        self._reported_unreadable: set[int] = set()
        self._is_registered = False

    def begin(
        self,
        step: int,
        arrays: Mapping[ValuePath, jax.Array | np.ndarray],
        contents: Mapping[str, Any],
    ) -> None:
        """Copies the arrays, and starts to write them in the background."""
        if self._writer is None:
            from tpudist.checkpoint.arrays import Writer  # Orbax takes a while to import

            self._writer = Writer(self._barrier, self._timeout_s)
        # Before the commit, so that retention knows the step at once. If the save fails,
        # `_after_save` forgets it again.
        if jax.process_index() == 0 and self._retention.needs_facts:
            self._on_disk.remember(step, contents)
        try:
            self._writer.begin(self._files.step(step), arrays, contents)
        except BaseException as error:  # Ctrl-C too
            self._abandon()
            self._after_save(step, error)
            if isinstance(error, Exception):
                raise self._failure(step, error) from error
            raise
        directory, wait = str(self._files), self._writer.wait
        self._save = Save(step, directory, wait, lambda error: self._after_save(step, error))
        _in_flight[str(self._files)] = self._save
        # A failure is reported at the next boundary between two steps, even if the program never
        # calls this manager again.
        if not self._is_registered:
            self._is_registered = True
            step_boundaries.register(self._warn)

    def check(self) -> None:
        """Raises the error of a save that has ended."""
        if self._save is not None and self._save.is_done:
            self._finish()

    def wait(self) -> None:
        """Waits until the running save has ended; raises its error."""
        if self._save is not None:
            self._save.join()
            self._finish()

    def close(self) -> None:
        """Waits, and ends the background threads."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _abandon(self) -> None:
        """Gives up a writer that was interrupted: its threads may still write their step."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception:  # an error of the step that is given up
            pass

    def _after_save(self, step: int, error: BaseException | None) -> None:
        """Runs in the background, in every process, after a save has ended."""
        self._barrier.finish_round(error)  # first, because others may wait for this process
        if error is not None:
            self._on_disk.forget(step)
        if jax.process_index():
            return
        if error is not None:
            self._files.remove_unfinished()
            return
        self._delete_old(step)

    def _delete_old(self, newest: int) -> None:
        """Deletes the readable steps that no rule keeps."""
        if self._retention.max_to_keep is None:
            return
        try:
            facts = self._on_disk.facts(read=self._retention.needs_facts)
        except OSError as failure:
            self._warnings.append(
                f"Could not read the directory {self._files}, so no old checkpoint was deleted: "
                f"{failure}. The next save tries again."
            )
            return
        # A step that cannot be read may be the best one, so it is kept. All others are deleted as
        # usual, because an error that lasts must not fill the disk. Without the times of some steps
        # the rule by hours keeps another step of an interval; the other rules keep what they would
        # keep if all steps were readable, or more.
        if new := [x for x in facts.unreadable if x not in self._reported_unreadable]:
            self._reported_unreadable.update(new)
            self._warnings.append(
                f"Could not read the checkpoint(s) of step {', '.join(map(str, new))} in "
                f"{self._files}: {facts.unreadable[new[0]]}. They are kept until they can be read. "
                f"If the error remains, delete them manually."
            )
        for old in self._retention.steps_to_remove(facts.steps, facts.times, facts.metrics, newest):
            if old in facts.unreadable:
                continue
            try:
                self._files.remove(old)
            except OSError as failure:
                self._warnings.append(
                    f"Could not delete the old checkpoint {self._files.step(old)}: {failure}. It "
                    f"still uses disk space. Delete it manually."
                )

    def _warn(self) -> None:
        """Issues warnings that arose in the background."""
        # In the program's thread, where warning filters and the stack of the program apply.
        while self._warnings:
            warnings.warn(self._warnings.pop(0), stacklevel=_OUTSIDE)
        save = self._save
        if save is not None and save.is_done and save.error is not None and not save.is_reported:
            save.is_reported = True
            warnings.warn(str(self._failure(save.step, save.error)), stacklevel=_OUTSIDE)

    def _finish(self) -> None:
        # Cleared first: an error is raised by one call only.
        save, self._save = self._save, None
        self._warn()
        if save is not None and save.error is not None:
            lost_saves.forget_raised(str(self._files))
            raise self._failure(save.step, save.error) from save.error

    def _failure(self, step: int, error: BaseException) -> CheckpointError:
        latest = self._on_disk.latest()
        good = (
            "No earlier checkpoint exists. "
            if latest is None
            else f"The last checkpoint is of step {latest}. "
        )
        return make_failure(f"of step {step} could not be saved to {self._files}", error, good)


def make_failure(problem: str, error: BaseException, remainder: str) -> CheckpointError:
    """Returns the error of a checkpoint that was not written.

    Args:
        problem: Completes "The checkpoint ...".
        error: Cause.
        remainder: Sentence that names the last good checkpoint, or "".
    """
    return CheckpointError(
        f"The checkpoint {problem}: {describe_error(error)}\n{remainder}Its partial "
        f"files are never restored, and are deleted if the directory allows it. Free disk space or "
        f"repair the directory, then save again."
    )
