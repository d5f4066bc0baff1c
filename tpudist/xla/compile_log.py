"""Records each compile of a replica function with its cause, for `tpudist.compile_log()`."""

import collections
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from tpudist.array_types import Shape
from tpudist.display.text_tables import Column, TextTable
from tpudist.goodput import goodput

_log = logging.getLogger("tpudist.compile")


@dataclasses.dataclass(frozen=True)
class CompileRecord:
    """One compile of a replica function.

    Attributes:
        function: Name of the function.
        cause: Reason of the compile: the first call, or the difference to the most similar call
            that was compiled before.
        seconds: Seconds from the call to the dispatch of the new program: tracing, proving,
            compiling.
    """

    function: str
    cause: str
    seconds: float


_records: collections.deque[CompileRecord] = collections.deque(maxlen=1000)
_records_lock = threading.Lock()


class BackendCompiles:
    """Counter of the programs that XLA compiles, or loads from its cache, in this process.

    Attributes:
        number: Number of programs since the counter was created.
    """

    def __init__(self):
        self.number = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.number += 1


@functools.cache
def backend_compiles() -> BackendCompiles:
    """Returns the counter of this process, which starts with the first call."""
    return BackendCompiles()


# From the 5th compile of one function on, the log level is WARNING: a compile takes as long as many
# steps, so a function that compiles repeatedly is usually a mistake.
_MANY_COMPILES = 5


def record_compile(function: str, cause: str, seconds: float, number: int) -> None:
    """Adds a compile to the log, and writes it to the logger `tpudist.compile`.

    Args:
        function: Name of the replica function.
        cause: Reason of the compile.
        seconds: Seconds of the call that compiled.
        number: Number of this compile of the function, from 1.
    """
    with _records_lock:
        _records.append(CompileRecord(function, cause, seconds))
    if recorder := goodput.current_recorder():
        recorder.move(seconds, goodput.Phase.COMPILE)
        recorder.note("compile", function=function, cause=cause, seconds=seconds, number=number)
    level = logging.INFO if number < _MANY_COMPILES else logging.WARNING
    _log.log(level, "compiled %s in %.2f s (time %d): %s", function, seconds, number, cause)


class CompileLog(list[CompileRecord]):
    """Compiles, oldest first: a list, which notebooks show as a table."""

    def _repr_html_(self) -> str:
        seconds = sum(record.seconds for record in self)
        rows = [(x.function, f"{x.seconds:.2f}", x.cause) for x in self[-_MAX_ROWS:]]
        more = len(self) - len(rows)
        notes = [f"and {more} before these"] if more else []
        title = f"{len(self)} compiles, {seconds:.1f} s"
        columns = ("function", Column("seconds", is_number=True), "cause")
        return TextTable(columns, rows, title, notes)._repr_html_()


_MAX_ROWS = 40  # in notebooks

# Prefix of the names of captured values in signatures. The name of an argument has no space.
CAPTURED = "captured "


def compile_log() -> CompileLog:
    """Returns the compiles of replica functions in this process, oldest first (the last 1000)."""
    with _records_lock:
        return CompileLog(_records)


def nearest_signature(
    earlier: Sequence[Mapping[str, str]], new: Mapping[str, str]
) -> Mapping[str, str]:
    """Returns the signature that differs from `new` in the fewest inputs.

    If several do, prefers one in which only captured values differ, then the latest.

    Args:
        earlier: Signatures of the programs compiled before, oldest first; at least 1.
        new: Signature of the call that is compiled now.
    """

    # Reversed, because `min` returns the first of several equal candidates.
    def distance(old: Mapping[str, str]) -> tuple[int, int]:
        differing = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
        return len(differing), sum(not name.startswith(CAPTURED) for name in differing)

    return min(reversed(earlier), key=distance)


def signature_change(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Describes the difference between two signatures.

    Args:
        old: Previous description (`describe`) of each input by name.
        new: Current description of each input by name.
    """
    changed = [
        f"{name} was {old[name]}, is {after}"
        for name, after in new.items()
        if name in old and old[name] != after
    ]
    changed += [f"{name} ({after}) is new" for name, after in new.items() if name not in old]
    changed += [f"{name} ({before}) was removed" for name, before in old.items() if name not in new]
    if not changed:
        return "the sharding or the weak type of an argument changed"
    more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
    return "; ".join(changed[:3]) + more


def name_of(function: Callable[..., object]) -> str:
    """Returns the name of a function, or of the function of a `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    # An object with `__call__` has no `__name__`.
    return getattr(function, "__name__", type(function).__name__)


def describe_call(name: str, arguments: str, whole: bool) -> str:
    """Returns the text of a call, for advice: `strategy.run(step, args=(batch,))`.

    Args:
        name: Name of the function.
        arguments: Text of the arguments, such as `model, ...`.
        whole: Whether the function is a `tpudist.function`, which is called without `run`.
    """
    return f"{name}({arguments})" if whole else f"strategy.run({name}, args=({arguments}))"


class ShapedValue(Protocol):
    """An array, the shape of one, or a PerReplica of arrays."""

    @property
    def shape(self) -> Shape:
        """Sizes of the dims."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the elements."""
        ...


def describe(value: ShapedValue) -> str:
    """Returns an array's dtype and shape as JAX writes them, such as `float32[8,128]`."""
    shape = ",".join(map(str, value.shape))
    # Neither NumPy's arrays nor random keys have a weak type.
    weak = "weak " if getattr(value, "weak_type", False) else ""
    return f"{weak}{value.dtype}[{shape}]"
