"""What checkpoints there are, and which of them are whole: every process finds the same."""

import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from etils import epath

from tpudist.checkpoint import manifest
from tpudist.checkpoint.directory import Directory
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import is_ours, read_contents
from tpudist.processes.coordination import Channel

_OUTSIDE = 5  # stack levels from a warning to the caller of `restore_or_initialize`


def agree(value: Any, channel: Channel, timeout_s: float) -> Any:
    """Returns the value of process 0, in all processes."""
    (answer, *_) = channel.exchange(json.dumps(value), timeout_s=timeout_s)
    return json.loads(answer)


def require_same(value: Any, channel: Channel, timeout_s: float, what: str) -> None:
    """Makes sure that all processes have the same value; `what` begins the error.

    Raises:
        CheckpointError: They do not; in all processes.
    """
    values = channel.exchange(str(value), timeout_s=timeout_s)
    if len(set(values)) > 1:
        listed = ", ".join(f"process {i}: {text}" for i, text in enumerate(values))
        raise CheckpointError(
            f"Processes tried to {what} ({listed}). All processes save and restore a checkpoint "
            f"together: pass the same value in all of them."
        )


def find_problems(path: epath.Path, channel: Channel, timeout_s: float) -> list[str]:
    """Returns why a checkpoint cannot be trusted, in all processes; an empty list is good."""
    foreign = jax.process_index() == 0 and not manifest.exists(path) and not is_ours(path)
    if agree(foreign, channel, timeout_s):
        return [
            "was not written by tpudist, or has lost its manifest: it has no checksums, so its "
            "values cannot be verified. To restore it anyway, pass verify=False to restore()"
        ]
    return _verify(path, channel, timeout_s)


def _verify(path: epath.Path, channel: Channel, timeout_s: float) -> list[str]:
    found = manifest.verify(path, jax.process_index(), jax.process_count())
    lines = [str(x) for x in found]
    if jax.process_count() > 1:
        answers = channel.exchange(json.dumps(lines), timeout_s=timeout_s)
        lines = sorted({line for answer in answers for line in json.loads(answer)})
    return lines


class History:
    """The steps of a directory, as far as they can be trusted."""

    def __init__(self, files: Directory, channel: Channel, timeout_s: float):
        """Of `files`; in several processes all ask the same, and talk over `channel`."""
        self._files = files
        self._channel = channel
        self._timeout_s = timeout_s
        self._damaged: dict[int, list[str]] = {}
        self._facts: dict[int, dict[str, Any]] = {}

    def steps(self) -> list[int]:
        """Those that are not known to be damaged, ascending."""
        return [step for step in self._files.steps() if step not in self._damaged]

    def latest(self) -> int | None:
        """The highest of these."""
        return max(self.steps(), default=None)

    def agree(self, value: Any) -> Any:
        """What process 0 has found: another may see a change in the directory before it."""
        return agree(value, self._channel, self._timeout_s)

    def require_same_step(self, step: int) -> None:
        """Makes sure that all processes are about to save the same step.

        Raises:
            CheckpointError: They are not; in all processes.
        """
        what = f"save different steps to {self._files}"
        require_same(f"step {step}", self._channel, self._timeout_s, what)

    # When they were saved, and their metrics.

    def remember(self, step: int, contents: Mapping[str, Any]) -> None:
        """Takes the facts of a step that is being saved."""
        self._facts[step] = {"metrics": contents["metrics"], "time": contents["time"]}

    def forget(self, step: int) -> None:
        """Of one that was not."""
        self._facts.pop(step, None)

    def times(self) -> dict[int, float]:
        """When each step was saved, in seconds, if it says so."""
        return {step: facts["time"] for step, facts in self._read_facts(self.steps())}

    def metrics(self) -> dict[int, dict[str, float]]:
        """The metrics of each step, if it has them."""
        return {step: facts["metrics"] for step, facts in self._read_facts(self.steps())}

    def _read_facts(self, steps: Iterable[int]) -> Iterable[tuple[int, dict[str, Any]]]:
        for step in steps:
            if step not in self._facts:
                try:
                    self.remember(step, read_contents(self._files.step(step)))
                except (OSError, ValueError, KeyError, TypeError):  # damaged, or not ours
                    self._facts[step] = {}
            if self._facts[step]:
                yield step, self._facts[step]

    # Which are whole.

    def verify(self, step: int) -> list[str]:
        """What is wrong with the files of a step; each process reads a share of them."""
        return _verify(self._files.step(step), self._channel, self._timeout_s)

    def choose(self, asked: int | None, *, verify: bool) -> tuple[int, tuple[str, ...]]:
        """The step asked for, or the newest; if it is damaged, the newest that is not.

        Returns:
            The step, and what is wrong with those that were skipped, of which it warns.

        Raises:
            CheckpointError: There is none, or none that is whole.
        """
        what = f"restore different steps of {self._files}"
        value = "the newest" if asked is None else f"step {asked}"
        require_same(value, self._channel, self._timeout_s, what)
        steps = self.agree(self._files.steps())
        if not steps:
            raise CheckpointError(
                f"{self._files} contains no checkpoint to restore. Check the path, or call "
                f"restore_or_initialize(), which starts from scratch if no checkpoint exists."
            )
        if asked is not None and asked not in steps:
            raise CheckpointError(
                f"{self._files} contains no checkpoint of step {asked}. It contains steps "
                f"{', '.join(map(str, steps))}."
            )
        skipped: list[str] = []
        for step in [asked] if asked is not None else reversed(steps):
            path = self._files.step(step)
            problems = find_problems(path, self._channel, self._timeout_s) if verify else []
            if not problems:
                for line in skipped:
                    warnings.warn(
                        f"{line}\nUsing the checkpoint of step {step} instead.",
                        stacklevel=_OUTSIDE,
                    )
                return step, tuple(skipped)
            if step not in self.agree(self._files.steps()):  # its writer has removed it meanwhile
                return self.choose(asked, verify=verify)
            self._damaged[step] = problems
            listed = "\n".join(f"  {problem}" for problem in problems)
            skipped.append(f"The checkpoint {self._files.step(step)} is damaged:\n{listed}")
        listed = "\n".join(skipped)
        raise CheckpointError(
            f"Every requested checkpoint is damaged, so nothing was restored.\n{listed}\nTo "
            f"restore one without verification, call restore(step, verify=False). To start from "
            f"scratch, use another directory."
        )

    # What becomes of the damaged ones.

    def make_room(self, step: int) -> None:
        """Sets aside what is damaged and makes sure that a new step can be written.

        In process 0 alone; the others `forget_damage` what it has set aside.

        Raises:
            CheckpointError: There is a step of that number, or the directory cannot be written.
            OSError: Neither can the damaged ones be renamed.
        """
        for damaged in [x for x in self._damaged if x in self._files.steps()]:
            self._files.set_aside(damaged)
        if step in self._files.steps():
            raise CheckpointError(
                f"The checkpoint {self._files.step(step)} already exists, and was not replaced. "
                f"Save step {step} under another number, or delete that directory first."
            )
        self._files.make(step)

    def forget_damage(self) -> None:
        """Forgets which steps were damaged: they are no longer there."""
        self._damaged.clear()
