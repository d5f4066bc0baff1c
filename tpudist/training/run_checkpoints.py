"""Checkpoints of a run: at intervals, at its end, and after SIGTERM."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpudist.checkpoint import Checkpoint, CheckpointManager
from tpudist.checkpoint.entries import find_entries
from tpudist.cluster_resolver import ClusterResolver
from tpudist.preemption import PreemptionCheckpointHandler, TerminationConfig
from tpudist.training.history import History


class Preempted(Exception):
    """SIGTERM arrived in some process, and the current step is saved."""


class RunCheckpoints:
    """Saves the state of a run in a folder, and restores the newest complete checkpoint at first.

    From its creation until `close`, SIGTERM of any process makes all processes save the same step.
    The next batch that they request then raises `Preempted`.

    Args:
        state: Everything that the steps change, with the `history` and the iterator of the data.
        history: Progress of the run.
        folder: Directory of the checkpoints, each in a directory of its own.
        every: Steps between two checkpoints; 0 for none before the end.
        max_to_keep: Number of recent checkpoints to keep; None keeps all.
        cluster_resolver: Resolver that knows how a preemption is announced.

    Attributes:
        before_save: Called without arguments before each save.
        restored: Path of the checkpoint that was restored; None if there was none.

    Raises:
        CheckpointError: If there are checkpoints, but none is complete or they contain a different
            state.
        TypeError: If `state` contains an object that no checkpoint can save.
    """

    def __init__(
        self,
        state: Checkpoint,
        history: History,
        folder: Path,
        *,
        every: int,
        max_to_keep: int | None = 3,
        cluster_resolver: ClusterResolver | None = None,
    ):
        # Raises TypeError now, and not at the first save, when steps would be lost.
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
        # The handler has restored the newest checkpoint in its constructor.
        report = self._manager.restored
        self.restored: str | None = None if report is None else report.path
        # `history` is part of the checkpoint, so it has the restored number of steps here.
        self._saved_step = history.num_steps if self.restored else None

    def is_due(self, step: int) -> bool:
        """Returns whether to save the state after `step` steps."""
        return self._every > 0 and step > 0 and step % self._every == 0 and step != self._saved_step

    def save(self) -> None:
        """Starts to save the current step; the next steps run meanwhile."""
        # Before `num_steps` is read: it collects the running steps, and so changes the history.
        # Then the state, the number of steps and the lines of metrics are of the same step.
        self.before_save()
        history = self._history
        if self._saved_step == history.num_steps or history.ended == "diverged":
            return
        begun_s = time.perf_counter()
        # Before `save`, which copies the values that it finds now.
        self._state.step = history.num_steps
        self._manager.save(history.num_steps)
        self._saved_step = history.num_steps
        history.num_saves += 1
        history.blocked_s += time.perf_counter() - begun_s

    def wait(self) -> None:
        """Waits until all saves are complete."""
        begun_s = time.perf_counter()
        self._manager.wait()
        self._history.blocked_s += time.perf_counter() - begun_s

    def close(self) -> None:
        """Waits for the saves, and restores the signal handler for SIGTERM."""
        # The handler first, because it saves with the manager.
        self._handler.close()
        self._manager.close()

    def _save_now(self) -> None:
        self.save()
        self.wait()


def _raise_preempted() -> None:
    raise Preempted
