"""Closure: a scheduled function with its arguments, and the state of its execution."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpudist.coordinator.function_store import StoredFunction
from tpudist.coordinator.remote_value import RemoteValue
from tpudist.xla import user_code

NOT_PLACED = -1
"""Number of a closure that waits for a place in the queue."""


@dataclasses.dataclass(eq=False)
class Closure:
    """A function with its arguments, which a worker runs.

    Attributes:
        number: Position in the order of scheduling. Every update that the closure sends to a server
            carries this number, and a server applies a number once. `NOT_PLACED` before the closure
            has a place in the queue.
        fn: Function to call.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: Receives the result or the error.
        stored: Copy of the function that workers keep; None if each call sends the function.
        per_worker_values: Arguments with a different value on each worker. The closure keeps them
            alive, because a worker deletes an iterator when its last reference is gone.
        retries: Reason for each repeated start.
        num_lost: Number of actors that were lost while they ran the closure, by role.
        workers: Workers that run the closure now -> time of their start in seconds. A slow closure
            may have two.
        is_claimed: Whether a worker has completed the closure. Later results are ignored.
    """

    number: int
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: RemoteValue
    stored: StoredFunction | None = None
    per_worker_values: Sequence[Any] = ()
    retries: list[str] = dataclasses.field(default_factory=list)
    num_lost: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    workers: dict[int, float] = dataclasses.field(default_factory=dict)
    is_claimed: bool = False

    @property
    def start_s(self) -> float:
        """Time at which the first of its current workers started it."""
        return min(self.workers.values())

    @property
    def function(self) -> str:
        """Name and place of the function, such as `train_step (train.py:12)`."""
        return f"{self._name}{self._place}"

    # Users schedule any callable: partials and jitted functions lack some of these attributes.

    @property
    def _name(self) -> str:
        return getattr(self.fn, "__qualname__", type(self.fn).__name__)

    @property
    def _place(self) -> str:
        line = user_code.line_of_definition(self.fn)
        return f" ({line})" if line else ""

    def __str__(self) -> str:
        subject = "A closure" if self.number == NOT_PLACED else f"closure {self.number}"
        return f"{subject}, '{self._name}'{self._place}"


@dataclasses.dataclass(frozen=True)
class RunningClosure:
    """A closure that runs on a worker, since `since_s` by the clock of the engine."""

    closure: Closure
    worker: int
    since_s: float
