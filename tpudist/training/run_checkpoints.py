"""When a run saves its state: now and then, when it ends, and when SIGTERM announces its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpudist.checkpoint import Checkpoint, CheckpointManager
from tpudist.checkpoint.entries import find_entries
from tpudist.preemption import PreemptionCheckpointHandler, TerminationConfig
from tpudist.training.history import History


class Preempted(Exception):
    """The machine is about to be taken away, and there is a checkpoint of the step reached."""


class RunCheckpoints:
    """Saves a run's state in a folder, and restores it; the loop says when there is a step to save.

    From when it is made until the end of its block, SIGTERM of any process makes all of them save
    the same step, and the next batch that they ask for raises `Preempted`.
    """

    def __init__(
        self,
        state: Checkpoint,
        history: History,
        folder: Path,
        *,
        every: int,
        max_to_keep: int | None = 3,
        cluster_resolver: Any = None,
    ):
        """Goes on from the newest checkpoint in `folder` that is whole, if there is one.

        Args:
            state: All that the steps change, with `step` and the `history`.
            history: How far the run is.
            folder: Where the checkpoints are, each in a folder of its own.
            every: Steps between two of them; 0 for none before the end.
            max_to_keep: How many of the newest to keep; None keeps all.
            cluster_resolver: Tells where a preemption shows.

        Raises:
            CheckpointError: There are checkpoints, but none is whole, or they are of another state.
            TypeError: `state` holds what no checkpoint can; before there is anything to lose.
        """
        find_entries(state)
        self.before_save: Callable[[], None] = lambda: None
        self._state: Any = state
        self._history, self._every = history, every
        self._manager = CheckpointManager(state, folder, max_to_keep=max_to_keep)
        self._handler = PreemptionCheckpointHandler(
            cluster_resolver,
            self._manager,
            termination_config=TerminationConfig(exit_fn=_raise_preempted, save_fn=self._save_now),
        )
        report = self._manager.restored  # by the handler
        self.restored: str | None = None if report is None else report.path
        self._saved_step = history.num_steps if self.restored else None

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be saved."""
        return self._every > 0 and step > 0 and step % self._every == 0 and step != self._saved_step

    def save(self) -> None:
        """Begins to save the step reached; the next steps run meanwhile."""
        self.before_save()
        history = self._history
        if self._saved_step == history.num_steps or history.ended == "diverged":
            return
        begun_s = time.perf_counter()
        self._state.step = history.num_steps
        self._manager.save(history.num_steps)
        self._saved_step = history.num_steps
        history.num_saves += 1
        history.blocked_s += time.perf_counter() - begun_s

    def wait(self) -> None:
        """Returns when all is saved."""
        begun_s = time.perf_counter()
        self._manager.wait()
        self._history.blocked_s += time.perf_counter() - begun_s

    def close(self) -> None:
        """Waits, and gives SIGTERM back."""
        self._handler.close()
        self._manager.close()

    def __enter__(self) -> RunCheckpoints:
        """Closes at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes, whether or not there was an error."""
        self.close()

    def _save_now(self) -> None:
        self.save()
        self.wait()


def _raise_preempted() -> None:
    raise Preempted
