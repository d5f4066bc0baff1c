"""Records each compile of a replica function with its cause, for `tpudist.compile_log()`."""

import collections
import dataclasses
import functools
import logging
import threading
from collections.abc import Mapping

import jax

from tpudist.display.text_tables import Column, TextTable
from tpudist.goodput import goodput
from tpudist.xla.compiler import phases as compile_phases
from tpudist.xla.compiler.phases import Phase

_log = logging.getLogger("tpudist.compile")
_MAX_RECORDS = 1000
_MAX_ROWS = 40  # in notebooks
# From the 5th compile of one function on, the log level is WARNING: a compile takes as long as many
# steps, so a function that compiles repeatedly is usually a mistake.
_MANY_COMPILES = 5
_SHORT_S = 0.1  # shorter phases are not logged


@dataclasses.dataclass(frozen=True)
class CompileRecord:
    """One compile of a replica function.

    Attributes:
        function: Name of the function.
        cause: Reason of the compile: the first call, or the difference to the most similar call
            that was compiled before.
        seconds: Wall seconds from the call to the dispatch of the new program.
        phases: The wall seconds of each part of `seconds`: "trace" calls your function with
            abstract values, "proofs" checks the trace and finds warnings, "rows" writes the
            program for partial batches, "lowering" translates the program for the compiler, and
            "XLA" compiles it, or loads it from the cache of compiled programs. The rest of
            `seconds` places arguments and describes the call.
    """

    function: str
    cause: str
    seconds: float
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)


_records: collections.deque[CompileRecord] = collections.deque(maxlen=_MAX_RECORDS)
_records_lock = threading.Lock()


class BackendCompiles:
    """Counter of the programs that XLA compiles, or loads from its cache, in this process.

    Attributes:
        num_programs: Number of programs since the counter was created.
    """

    def __init__(self):
        self.num_programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.num_programs += 1


@functools.cache
def backend_compiles() -> BackendCompiles:
    """Returns the counter of this process, which starts with the first call."""
    compile_phases.listen()
    return BackendCompiles()


def record_compile(
    function: str, cause: str, seconds: float, number: int, phases: Mapping[str, float]
) -> None:
    """Adds a compile to the log, and writes it to the logger `tpudist.compile`.

    Args:
        function: Name of the replica function.
        cause: Reason of the compile.
        seconds: Seconds of the call that compiled.
        number: Number of this compile of the function, from 1.
        phases: Seconds of its phases; see `CompileRecord`.
    """
    with _records_lock:
        _records.append(CompileRecord(function, cause, seconds, phases))
    if recorder := goodput.current_recorder():
        recorder.move(seconds, goodput.Phase.COMPILE)
        recorder.note("compile", function=function, cause=cause, seconds=seconds, number=number)
    level = logging.INFO if number < _MANY_COMPILES else logging.WARNING
    parts = ", ".join(f"{name} {part:.2f} s" for name, part in phases.items() if part >= _SHORT_S)
    _log.log(
        level,
        "compiled %s in %.2f s%s (time %d): %s",
        *(function, seconds, f" ({parts})" if parts else "", number, cause),
    )


class CompileLog(list[CompileRecord]):
    """Compiles, oldest first: a list, which notebooks show as a table."""

    def _repr_html_(self) -> str:
        seconds = sum(record.seconds for record in self)
        rows = [
            (x.function, f"{x.seconds:.2f}", *_write_phases(x.phases), x.cause)
            for x in self[-_MAX_ROWS:]
        ]
        more = len(self) - len(rows)
        notes = [f"and {more} before these"] if more else []
        title = f"{len(self)} compiles, {seconds:.1f} s"
        numbers = [Column(name, is_number=True) for name in ("seconds", *Phase)]
        columns = ("function", *numbers, "cause")
        return TextTable(columns, rows, title, notes)._repr_html_()


def _write_phases(phases: Mapping[str, float]) -> list[str]:
    return [f"{phases[name]:.2f}" if name in phases else "" for name in Phase]


def compile_log() -> CompileLog:
    """Returns the compiles of replica functions in this process, oldest first (the last 1000)."""
    with _records_lock:
        return CompileLog(_records)
