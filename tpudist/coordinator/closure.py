"""Closure: a numbered job, and what has become of it."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpudist.coordinator.function_store import StoredFunction
from tpudist.coordinator.remote_value import RemoteValue


@dataclasses.dataclass(eq=False)
class Closure:
    """A function with its arguments, to be run by some worker.

    Attributes:
        number: Counts closures; what it changes carries this number, so that no repetition has an
            effect twice. None of one that only makes something on its worker, or has no place in
            the queue yet.
        fn: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: Where its result goes.
        worker: Which one is to run it; None for any.
        stored: What workers make the function of, where they are not sent it each time.
        held: What it is given that is another thing on each worker, and must live until it has
            finished: iterators of which it is one of the last users, and values.
        retries: Why it was begun again, each time.
        num_lost: How many actors of a role were lost with it.
        workers: Who runs it, and since when, in seconds: more than one if it was slow.
        is_claimed: Whether one of them has finished it, so that the others do not count.
    """

    number: int | None
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: RemoteValue
    worker: int | None = None
    stored: StoredFunction | None = None
    held: Sequence[Any] = ()
    retries: list[str] = dataclasses.field(default_factory=list)
    num_lost: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    workers: dict[int, float] = dataclasses.field(default_factory=dict)
    is_claimed: bool = False

    @property
    def begun_s(self) -> float:
        """When the first of those that run it began."""
        return min(self.workers.values())

    @property
    def function(self) -> str:
        """What its function is called, and where it is: `train_step (train.py:12)`."""
        return f"{self._name}{self._place}"

    @property
    def _name(self) -> str:
        return getattr(self.fn, "__qualname__", type(self.fn).__name__)

    @property
    def _place(self) -> str:
        code = getattr(self.fn, "__code__", None)
        return f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""

    def __str__(self) -> str:
        which = "A closure" if self.number is None else f"closure {self.number}"
        return f"{which}, '{self._name}'{self._place}"
