"""Every compile is recorded with its cause."""

import collections
import dataclasses
import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tpudist.display.text_tables import Column, TextTable
from tpudist.goodput import goodput

_log = logging.getLogger("tpudist.compile")


@dataclasses.dataclass(frozen=True)
class CompileRecord:
    """One compile of a replica function.

    Attributes:
        function: Its name.
        cause: Why it was compiled: the first call, or how the call differs from the most similar
            call that was compiled before.
        seconds: From the call to the dispatch of the new program: tracing, proving, compiling.
    """

    function: str
    cause: str
    seconds: float


_records: collections.deque[CompileRecord] = collections.deque(maxlen=1000)
_records_lock = threading.Lock()


class BackendCompiles:
    """Counts what XLA compiles in this process, or loads from its cache, since it was made.

    Attributes:
        number: How many programs that were.
    """

    def __init__(self):
        """Listens from now on."""
        self.number = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.number += 1


@functools.cache
def backend_compiles() -> BackendCompiles:
    """The process's counter, which starts when it is first asked for."""
    return BackendCompiles()


# From so many compiles of one function on, they are a warning: each costs more than many steps.
_MANY_COMPILES = 5


def record_compile(function: str, cause: str, seconds: float, number: int) -> None:
    """Adds a compile to the log, and tells the logger `tpudist.compile`.

    Args:
        function: The name of the replica function.
        cause: Why it was compiled.
        seconds: How long the call took that compiled it.
        number: Of this compile among those of the function, from 1.
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
        rows = [(x.function, f"{x.seconds:.2f}", x.cause) for x in self[-_SHOWN:]]
        more = len(self) - len(rows)
        notes = [f"and {more} before these"] if more else []
        title = f"{len(self)} compiles, {seconds:.1f} s"
        columns = ("function", Column("seconds", is_number=True), "cause")
        return TextTable(columns, rows, title, notes)._repr_html_()


_SHOWN = 40

# What the names of captured values begin with in signatures; no argument's name has a space.
CAPTURED = "captured "


def compile_log() -> CompileLog:
    """The compiles of replica functions in this process, oldest first (the last 1000)."""
    with _records_lock:
        return CompileLog(_records)


def nearest_signature(
    earlier: Sequence[Mapping[str, str]], new: Mapping[str, str]
) -> Mapping[str, str]:
    """Returns the signature that differs from `new` in the fewest inputs.

    Of several, it is one with the same arguments, where only captured values differ, or else the
    latest.

    Args:
        earlier: The signatures of the programs compiled before, oldest first; at least 1.
        new: The signature of the call that is compiled now.
    """

    def distance(old: Mapping[str, str]) -> tuple[int, int]:
        differing = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
        return len(differing), sum(not name.startswith(CAPTURED) for name in differing)

    return min(reversed(earlier), key=distance)


def signature_change(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What differs between two signatures, in words.

    Args:
        old: For each input by name, its description before, as `describe` gives it.
        new: For each input by name, its description now.
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


def name_of(function: Any) -> str:
    """Returns the name of a function: of a `functools.partial`, that of its function."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def describe_call(name: str, arguments: str, whole: bool) -> str:
    """Returns the text of a call, for advice: `strategy.run(step, args=(batch,))`.

    Args:
        name: The name of the function.
        arguments: The text of the arguments, such as `model, ...`.
        whole: Whether the function is a `tpudist.function`, which is called without `run`.
    """
    return f"{name}({arguments})" if whole else f"strategy.run({name}, args=({arguments}))"


def describe(value: Any) -> str:
    """An array's dtype and shape as JAX writes them, such as `float32[8,128]`."""
    shape = ",".join(map(str, value.shape))
    weak = "weak " if getattr(value, "weak_type", False) else ""
    return f"{weak}{value.dtype}[{shape}]"
