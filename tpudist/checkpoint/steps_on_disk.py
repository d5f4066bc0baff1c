"""Finds the steps of a directory and verifies them; all processes come to the same result.

Each process may see the directory at another moment, so process 0's view counts (`agree`). The
files are verified in shares, one for each process.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from etils import epath

from tpudist.checkpoint import manifest
from tpudist.checkpoint.directory import Directory
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import is_ours, read_contents
from tpudist.options.member_names import format_values
from tpudist.processes.coordination import Channel

_T = TypeVar("_T")

_NUM_LISTED = 5  # steps at each end of a list, in errors
_OUTSIDE = 5  # stack levels from a warning in `choose` to the caller of `restore_or_initialize`


def agree(find: Callable[[], _T], channel: Channel, timeout_s: float) -> _T:
    """Returns the result of `find`, in all processes; only process 0 calls it.

    Raises:
        OSError: In all processes, if `find` raises it.
    """
    result, problem = None, ""
    if jax.process_index() == 0:
        try:
            result = find()
        except OSError as error:
            problem = f"Process 0 cannot read the checkpoints: {error}"
    # They travel as JSON, so callers must not rely on tuples: they arrive as lists.
    own = json.dumps((result, problem))
    answer = channel.combine(own, lambda texts: texts[0], timeout_s=timeout_s)
    result, problem = json.loads(answer)
    if problem:
        raise OSError(problem)
    return result


def require_same(value: object, channel: Channel, timeout_s: float, difference: str) -> None:
    """Checks that all processes have the same value.

    Args:
        value: Value of this process, compared as a text.
        channel: Channel of the processes.
        timeout_s: Seconds to wait for the others.
        difference: Completes "Processes tried to ..." in the error.

    Raises:
        CheckpointError: In all processes, if the values differ.
    """

    def list_if_different(values: list[str]) -> str:
        if len(set(values)) == 1:
            return ""
        return format_values("process", dict(enumerate(values)))

    if listed := channel.combine(str(value), list_if_different, timeout_s=timeout_s):
        raise CheckpointError(
            f"Processes tried to {difference} ({listed}). All processes save and restore a "
            f"checkpoint together: pass the same value in all of them."
        )


def find_problems(path: epath.Path, channel: Channel, timeout_s: float) -> list[str]:
    """Returns the problems of a checkpoint, in all processes; an empty list if it is intact."""
    if agree(lambda: not manifest.exists(path) and not is_ours(path), channel, timeout_s):
        return [
            "was not written by tpudist, or has lost its manifest: it has no checksums, so its "
            "values cannot be verified. To restore it anyway, pass verify=False to restore()"
        ]
    return _verify(path, channel, timeout_s)


def _verify(path: epath.Path, channel: Channel, timeout_s: float) -> list[str]:
    problems = manifest.verify(path, jax.process_index(), jax.process_count())
    lines = [str(x) for x in problems]
    if jax.process_count() == 1:
        return lines

    def merge(texts: list[str]) -> str:
        return json.dumps(sorted({line for text in texts for line in json.loads(text)}))

    return json.loads(channel.combine(json.dumps(lines), merge, timeout_s=timeout_s))


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """Facts about the steps of a directory, by which old ones are deleted.

    Attributes:
        steps: Numbers of all steps.
        times: Number of a step -> time of its save, in seconds.
        metrics: Number of a step -> its metrics.
        unreadable: Number of a step -> the error of the storage that hides its time and metrics.
            Damaged and foreign steps are not among them: they have neither.
    """

    steps: list[int]
    times: dict[int, float]
    metrics: dict[int, dict[str, float]]
    unreadable: dict[int, OSError]


class StepsOnDisk:
    """The steps of a directory, with their times, metrics and problems.

    All processes must call the same methods in the same order.

    Args:
        files: The directory.
        channel: Channel of the processes.
        timeout_s: Seconds to wait for other processes.

    Attributes:
        is_clean: Whether there are no partial files of a save. False at first, because an earlier
            program may have left some.
    """

    def __init__(self, files: Directory, channel: Channel, timeout_s: float):
        self._files = files
        self._channel = channel
        self._timeout_s = timeout_s
        self.is_clean = False
        # Steps that failed verification -> their problems. They stay on the disk, and do not count,
        # until the next save sets them aside: restoring must not change the directory.
        self._damaged: dict[int, list[str]] = {}
        # Step on the disk -> its time and its metrics; empty if the step is damaged, or not ours.
        self._times_and_metrics: dict[int, dict[str, Any]] = {}

    def steps(self) -> list[int]:
        """Returns the numbers of the steps that are not known to be damaged, ascending."""
        return [step for step in self._files.steps() if step not in self._damaged]

    def latest(self) -> int | None:
        """Returns the highest of these numbers, or None."""
        return next((x for x in self._files.newest_first() if x not in self._damaged), None)

    def agree(self, find: Callable[[], _T]) -> _T:
        """Returns process 0's result: other processes may see a change in the directory earlier."""
        return agree(find, self._channel, self._timeout_s)

    def require_same_step(self, step: int) -> None:
        """Checks that all processes are about to save the same step.

        Raises:
            CheckpointError: In all processes, if they are not.
        """
        difference = f"save different steps to {self._files}"
        require_same(f"step {step}", self._channel, self._timeout_s, difference)

    # Times and metrics.

    def remember(self, step: int, contents: Mapping[str, Any]) -> None:
        """Records the time and the metrics of a step that is being saved."""
        self._times_and_metrics[step] = _read_facts(contents)

    def forget(self, step: int) -> None:
        """Forgets a step that was not saved."""
        self._times_and_metrics.pop(step, None)

    def facts(self, *, read: bool = True) -> StepFacts:
        """Returns the steps, and for each readable step the time of its save and its metrics.

        Args:
            read: Whether to read times and metrics from the steps. Each is read once.

        Raises:
            OSError: If the directory cannot be read.
        """
        steps = self.steps()
        unreadable: dict[int, OSError] = {}
        # Another thread may do the same, so the result is made of this call's own dict.
        known: dict[int, dict[str, Any]] = {}
        for step in steps:
            facts = self._times_and_metrics.get(step)
            if facts is None and read:
                try:
                    facts = _read_facts(read_contents(self._files.step(step)))
                except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
                    facts = {}
                except OSError as error:  # not remembered, so the next call reads the step again
                    unreadable[step] = error
            if facts is not None:
                known[step] = facts
        # Steps that were deleted are forgotten: a long run saves any number of steps.
        self._times_and_metrics = known
        times = {step: x["time"] for step, x in known.items() if x}
        metrics = {step: x["metrics"] for step, x in known.items() if x}
        return StepFacts(steps, times, metrics, unreadable)

    def metrics(self) -> dict[int, dict[str, float]]:
        """Returns the metrics of each step that has some.

        Raises:
            OSError: If the storage fails.
        """
        facts = self.facts()
        for error in facts.unreadable.values():
            raise error
        return facts.metrics

    # Verification.

    def verify(self, step: int) -> list[str]:
        """Returns the problems of a step's files; each process reads a share of them."""
        return _verify(self._files.step(step), self._channel, self._timeout_s)

    def choose(self, requested: int | None, *, verify: bool) -> tuple[int, tuple[str, ...]]:
        """Returns the requested step, or the newest intact one; warns of those it skipped.

        Returns:
            The step, and the problems of the skipped steps.

        Raises:
            CheckpointError: If there is no such step, or it is damaged.
        """
        difference = f"restore different steps of {self._files}"
        value = "the newest" if requested is None else f"step {requested}"
        require_same(value, self._channel, self._timeout_s, difference)
        # Ends, because it repeats only if a step has disappeared: the program that deleted it has
        # saved newer ones, and a requested step that is missing is an error.
        while True:
            skipped: list[str] = []
            for step in self._steps_to_try(requested):
                path = self._files.step(step)
                problems = find_problems(path, self._channel, self._timeout_s) if verify else []
                if not problems:
                    for line in skipped:
                        warnings.warn(
                            f"{line}\nUsing the checkpoint of step {step} instead.",
                            stacklevel=_OUTSIDE,
                        )
                    return step, tuple(skipped)
                # Another program may have deleted the step while it was read.
                if not self.agree(lambda step=step: self._files.has(step)):
                    break
                self._damaged[step] = problems
                listed = "\n".join(f"  {problem}" for problem in problems)
                skipped.append(f"The checkpoint {path} is damaged:\n{listed}")
            else:
                listed = "\n".join(skipped)
                raise CheckpointError(
                    f"Every requested checkpoint is damaged, so nothing was restored.\n{listed}\n"
                    f"To restore one without verification, call restore(step, verify=False). To "
                    f"start from scratch, use another directory."
                )

    def _steps_to_try(self, requested: int | None) -> Iterator[int]:
        """Yields the requested step, or all steps, newest first."""
        if requested is not None:
            if not self.agree(lambda: self._files.has(requested)):
                raise CheckpointError(
                    f"{self._files} contains no checkpoint of step {requested}. It contains steps "
                    f"{self.agree(lambda: _shorten(self._files.steps()))}."
                )
            yield requested
            return
        # One at a time: the newest is usually the one, and there may be thousands.
        newest_first = self._files.newest_first()
        is_empty = True
        while (step := self.agree(lambda: next(newest_first, None))) is not None:
            is_empty = False
            yield step
        if is_empty:
            raise CheckpointError(
                f"{self._files} contains no checkpoint to restore. Check the path, or call "
                f"restore_or_initialize(), which starts from scratch if no checkpoint exists."
            )

    # Before a save.

    def prepare(self, step: int) -> None:
        """Prepares the directory for a new step; all processes succeed, or all raise.

        Raises:
            CheckpointError: If a step of that number exists, or the directory cannot be written.
        """
        # Only process 0 changes the directory. Its error goes to all processes before any raises:
        # if only process 0 raised, the others would wait for it in the save.
        if problem := self.agree(lambda: self._make_room(step)):
            raise CheckpointError(problem)
        self._damaged.clear()

    def _make_room(self, step: int) -> str:
        """Removes files that block a new step, in process 0; returns the problem or ""."""
        try:
            if not self.is_clean:
                self._files.remove_unfinished()
                self.is_clean = True
            for damaged in [x for x in self._damaged if self._files.has(x)]:
                self._files.set_aside(damaged)
                # If this save fails later, the next one must not rename a good step of this number.
                del self._damaged[damaged]
            if self._files.has(step):
                return (
                    f"The checkpoint {self._files.step(step)} already exists, and was not "
                    f"replaced. Save step {step} under another number, or delete that directory "
                    f"first."
                )
            self._files.make(step)
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return f"Cannot save step {step} to {self._files}: {error}"
        return ""


def _read_facts(contents: Mapping[str, Any]) -> dict[str, Any]:
    return {"metrics": contents["metrics"], "time": contents["time"]}


def _shorten(steps: Sequence[int]) -> str:
    """Returns the numbers as text; only the first and the last of many."""
    if len(steps) <= 2 * _NUM_LISTED:
        return ", ".join(map(str, steps)) or "none"
    first, last = steps[:_NUM_LISTED], steps[-_NUM_LISTED:]
    return f"{', '.join(map(str, first))}, ..., {', '.join(map(str, last))} ({len(steps)} in all)"
