"""Notes what the main thread of a process spends its time with, in a file of JSON lines.

At each moment it is in one phase: the innermost that is open, else the start of the program, or
after the first step the steps. So the phases add up to the time of the process. A thread writes
what they took once a second, so that of a process that is killed a second is missing at most.
"""

import atexit
import collections
import enum
import functools
import itertools
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax

FOLDER = "goodput"
"""The name of the folder in a run's, with a file for each start of each process."""
INTERVAL_S = 1.0
GAP_S = 0.2
"""A pause between two calls that is noted by itself, if it is far above the usual one as well."""
VARIABLE = "TPUDIST_GOODPUT"
REPLACED_AT = "TPUDIST_REPLACED_AT"
"""A variable: when this program has replaced another one in its process, in seconds since 1970."""
_GAP_FACTOR = 4.0
_REMEMBERED = 32  # calls, of which the pauses are known
_ALL_CALLS = 64  # of which all beginnings are noted; of those after, as many in each octave


P = ParamSpec("P")
T = TypeVar("T")


class Phase(enum.Enum):
    """What time is spent with."""

    STARTUP = "start"
    COMPILE = "compile"
    INPUT = "input"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    WAIT = "wait for others"


class _Recorder:
    """That of this process."""

    def __init__(self, file: Path, process: int, num_processes: int):
        self._file = file.open("x", buffering=1)
        self._thread_id = threading.get_ident()
        self._stack, self._entered = [Phase.STARTUP], []
        self._lock = threading.Lock()
        self._seconds: dict[Phase, float] = dict.fromkeys(Phase, 0.0)
        began = _time_of_start()
        self._seconds[Phase.STARTUP] = time.time() - began
        self._last = time.perf_counter()
        self._written: dict[Phase, float] = dict.fromkeys(Phase, 0.0)
        self._begins: collections.deque[tuple[int, float]] = collections.deque(maxlen=_REMEMBERED)
        self._pauses: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._noted_to = 0
        self._inner: collections.deque[tuple[float, float]] = collections.deque(maxlen=_REMEMBERED)
        self.calls, self._goes_on_at = 0, -1
        self._closing = threading.Event()
        self.note(
            "start",
            process=process,
            processes=num_processes,
            began=began,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        self._write()
        self._thread = threading.Thread(target=self._write_often, name="goodput", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this is the thread whose time is noted."""
        return threading.get_ident() == self._thread_id

    def follow_thread(self) -> None:
        """The time of this thread is noted from here on."""
        self._count()
        self._thread_id = threading.get_ident()
        self._stack, self._entered = [Phase.STARTUP], []
        self._goes_on_at = self.calls + 1 if self.calls else -1

    def enter(self, phase: Phase) -> None:
        """Time counts for `phase` from here on."""
        self._count()
        self._stack.append(phase)
        self._entered.append(self._last)

    def leave(self) -> None:
        """Time counts for the phase before, from here on."""
        self._count()
        self._stack.pop()
        if len(self._stack) == 1:
            self._inner.append((self._last, self._last - self._entered[0]))
        self._entered.pop()

    def move(self, seconds: float, phase: Phase) -> None:
        """The last so many seconds were of a phase, as it turns out, but for phases inside."""
        self._count()
        began = self._last - seconds
        seconds -= sum(inner for ended, inner in self._inner if ended > began)
        with self._lock:
            for known in (self._stack[-1], Phase.STARTUP):  # the first step begins in the start
                there = max(0.0, min(seconds, self._seconds[known]))
                self._seconds[known] -= there
                self._seconds[phase] += there
                seconds -= there

    def begin_call(self) -> None:
        """A program of all replicas is about to be dispatched."""
        if self._stack[0] is Phase.STARTUP:
            self._count()
            self._stack[0] = Phase.STEP
        if self.calls == self._goes_on_at:  # the first call of this thread is done
            self.note("goes on")
        now = time.time()
        pause = now - self._begins[-1][1] if self._begins else 0.0
        self._begins.append((self.calls, now))
        self.calls += 1
        if pause > GAP_S and self._pauses:
            if pause > _GAP_FACTOR * statistics.median(self._pauses):
                self._note_begins()
        self._pauses.append(pause)
        call = self.calls - 1
        if call % stride_of(call) < 2:
            self.note("call", call=call, began=now)

    def note(self, kind: str, **facts: Any) -> None:
        """Writes a line."""
        line = json.dumps({"kind": kind, "time": time.time(), **facts})
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        """The program ends."""
        self._closing.set()
        self._thread.join(2 * INTERVAL_S)
        self._write()
        self.note("end")
        with self._lock:
            self._file.close()

    def flush(self) -> None:
        """Writes what is known until now."""
        self._write()

    def _note_begins(self) -> None:
        """Of calls that others may have begun at other times."""
        new = [x for x in self._begins if x[0] >= self._noted_to]
        self._noted_to = self.calls
        self.note("gap", begins=new)

    def _count(self) -> None:
        now = time.perf_counter()
        with self._lock:
            self._seconds[self._stack[-1]] += now - self._last
            self._last = now

    def _write_often(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self._write()

    def _write(self) -> None:
        self._count()
        with self._lock:
            spent = {x.value: round(self._seconds[x] - self._written[x], 6) for x in Phase}
            self._written = dict(self._seconds)
        seconds = {name: s for name, s in spent.items() if s}
        self.note("time", seconds=seconds, calls=self.calls)


def stride_of(call: int) -> int:
    """Of how many calls around this one the beginning of one, and of the next, is noted."""
    return 1 << max(0, (call // _ALL_CALLS).bit_length() - 1)


_recorder: _Recorder | None = None


@atexit.register  # before all that waits at the end of a program, which is called before it
def close() -> None:
    """Writes all that is known: the program ends."""
    if _recorder is not None:
        _recorder.close()


def current_recorder() -> _Recorder | None:
    """That of this process, for its main thread; None where nothing is noted."""
    return _recorder if _recorder is not None and _recorder.is_here else None


class phase:
    """In the `with` block time counts for a phase, where it is noted at all."""

    __slots__ = ("_phase", "_recorder")

    def __init__(self, phase: Phase):
        """Of which phase."""
        self._phase = phase

    def __enter__(self) -> None:
        """Begins it."""
        self._recorder = current_recorder()
        if self._recorder is not None:
            self._recorder.enter(self._phase)

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        if self._recorder is not None:
            self._recorder.leave()


def count_as(of: Phase) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Has the time of each call of a function count for a phase, where it is noted at all."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with phase(of):
                return function(*args, **kwargs)

        return call

    return decorate


def begin_call() -> None:
    """Notes that a program of all replicas is about to be dispatched."""
    if _recorder is not None and _recorder.is_here:
        _recorder.begin_call()


def note(kind: str, **facts: Any) -> None:
    """Notes an event, in any thread."""
    if _recorder is not None:
        _recorder.note(kind, **facts)


def note_calls(kind: str, **facts: Any) -> None:
    """Notes an event, and how many calls of programs came before it."""
    if _recorder is not None:
        _recorder.note(kind, calls=_recorder.calls, **facts)


def follow_thread() -> None:
    """Notes the time of this thread from here on, in the place of another one."""
    if _recorder is not None:
        _recorder.follow_thread()


def flush() -> None:
    """Writes what is known until now, in any thread."""
    if _recorder is not None:
        _recorder.flush()


def record_if_asked() -> None:
    """Begins where the variable `TPUDIST_GOODPUT` names a folder."""
    if folder := os.environ.get(VARIABLE):
        record_goodput(folder)


def record_goodput(folder: str | os.PathLike[str]) -> None:
    """Notes from now on what the time of this process goes to, for `tpudist doctor folder`.

    Each process writes a file of its own in `folder/goodput`, a new one whenever it is started, of
    a few hundred bytes per second. It notes the time of the thread that calls this, and of several
    processes after their strategy was made, which connects them. A second call does nothing. The
    variable `TPUDIST_GOODPUT=folder` does the same where a strategy is made.

    Args:
        folder: Of the run; all processes and all starts of it have the same.

    Raises:
        OSError: Nothing can be written there.
    """
    global _recorder
    if _recorder is not None:
        return
    process, num_processes = jax.process_index(), jax.process_count()
    where = Path(folder) / FOLDER
    where.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        file = where / f"process-{process}-{number:04}.jsonl"
        if not file.exists():
            _recorder = _Recorder(file, process, num_processes)
            return


def _time_of_start() -> float:
    """When this program was started, in seconds since 1970; on other systems than Linux, now.

    That is when its process was, unless it has replaced another one in it.
    """
    return max(_time_of_process(), float(os.environ.get(REPLACED_AT, 0)))


def _time_of_process() -> float:
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
