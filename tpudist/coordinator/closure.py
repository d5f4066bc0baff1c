"""Closure: a numbered job, and what has become of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpudist.coordinator.remote_value import RemoteValue


@dataclasses.dataclass(eq=False)
class Closure:
    """A function with its arguments, to be run by some worker.

    Attributes:
        number: Counts closures; what it changes carries this number, so that no repetition has an
            effect twice. None of one that only makes something on its worker.
        fn: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: Where its result goes.
        worker: Which one is to run it; None for any.
        kept: Stands for the function where workers have it already; see `worker.Kept`.
        retries: Why it was begun again, each time.
    """

    number: int | None
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: RemoteValue
    worker: int | None = None
    kept: Any = None
    retries: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
        code = getattr(self.fn, "__code__", None)
        place = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""
        return f"closure {self.number}, '{name}'{place}"
