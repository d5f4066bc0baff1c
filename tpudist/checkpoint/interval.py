"""Decides by a counter of steps whether it is time for a checkpoint."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.holders import Container


def as_int(x: object) -> int | None:
    """Returns a whole number, array `[]` or Variable as a Python int; None for other objects.

    Raises:
        CheckpointError: If `x` is an array that was donated.
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
    is_integer = value.ndim == 0 and np.issubdtype(value.dtype, np.integer)
    return int(value) if is_integer else None


def find_step(checkpoint: object) -> Any:
    """Returns the `step` of a checkpoint; None if the user gave it none."""
    return getattr(checkpoint, "step", None)  # an attribute of the user


class Interval:
    """The minimum number of steps from one save to the next.

    Args:
        num_steps: Number of steps, at least 1; None if every save is allowed.
        counter: Variable or number that counts steps; None for the `step` of `checkpoint`.
        checkpoint: The checkpoint that is saved.

    Raises:
        ValueError: If `num_steps` is out of range, or there is no counter.
    """

    def __init__(self, num_steps: int | None, counter: object, checkpoint: Container):
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
        # A `step` of None is accepted: the user may set it later.
        if counter is None and not hasattr(checkpoint, "step"):
            raise ValueError(
                "CheckpointManager(checkpoint_interval=...) needs a step counter. Pass "
                "step_counter, or a checkpoint that has a `step`."
            )

    def is_over(self, latest: Callable[[], int | None]) -> bool:
        """Whether it is time for a save.

        Args:
            latest: Called without arguments before the first save of a program; returns the number
                of the newest checkpoint.
        """
        if self.num_steps is None:
            return True
        current, last = self._current_step(), self._last
        # After a restart the interval continues from the newest checkpoint, whose number is its
        # step. The numbers of checkpoints need not be values of a counter of the user's own.
        if last is None and self._counter is None:
            last = latest()
        return last is None or current is None or current - last >= self.num_steps

    def begin(self) -> None:
        """Starts to count at the current step."""
        self._last = self._current_step()

    def _current_step(self) -> int | None:
        counter = self._counter
        return as_int(find_step(self._checkpoint) if counter is None else counter)
