"""Counting steps: the number of a checkpoint, and whether it is time for one."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tpudist.checkpoint.errors import CheckpointError


def as_int(x: Any) -> int | None:
    """A whole number of any kind, also an array or a Variable, as a Python int; else None.

    Raises:
        CheckpointError: It has been donated.
    """
    if isinstance(x, bool) or x is None:
        return None
    if isinstance(x, jax.Array) and x.is_deleted():
        raise CheckpointError(
            "The step number is an array that was donated to a step or deleted. Pass the "
            "checkpoint the array that the step returned."
        )
    try:
        value = np.asarray(x)
    except TypeError:
        return None
    whole = value.ndim == 0 and np.issubdtype(value.dtype, np.integer)
    return int(value) if whole else None


class Interval:
    """How many steps there are at least from one save to the next."""

    def __init__(self, num_steps: int | None, counter: Any, checkpoint: Any):
        """An interval of `num_steps`, or none.

        Args:
            num_steps: From 1.
            counter: What counts; None for the `step` of `checkpoint`.
            checkpoint: A Checkpoint.

        Raises:
            ValueError: The number is out of range, or nothing counts.
        """
        self.num_steps = num_steps
        self._counter = counter
        self._checkpoint = checkpoint
        self._last: int | None = None
        if num_steps is None:
            return
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
            raise ValueError(
                f"CheckpointManager(checkpoint_interval={num_steps!r}): checkpoint_interval must "
                f"be a whole number of at least 1."
            )
        if counter is None and not hasattr(checkpoint, "step"):
            raise ValueError(
                "CheckpointManager(checkpoint_interval=...) needs a step counter. Pass "
                "step_counter, or a checkpoint that has a `step`."
            )

    def is_over(self, latest: Callable[[], int | None]) -> bool:
        """Whether it is time; `latest` gives the newest step, for the first save of a program."""
        if self.num_steps is None:
            return True
        now, last = self._current_step(), self._last
        if last is None and self._counter is None:
            last = latest()
        return last is None or now is None or now - last >= self.num_steps

    def begin(self) -> None:
        """Counts from now on."""
        self._last = self._current_step()

    def _current_step(self) -> int | None:
        counter = self._counter
        return as_int(getattr(self._checkpoint, "step", None) if counter is None else counter)
