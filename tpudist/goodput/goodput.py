"""Records how the main thread of a process spends its time, in a file of JSON lines.

At each moment the thread is in one phase: the innermost open one. Without an open phase, it is in
the startup phase before the first step, and in the step phase after it. So the phases add up to the
time of the process. A thread writes the times once per second, so a killed process loses at most
one second. `run_history` reads the files, and `diagnosis` explains them.
"""

import atexit
import collections
import contextlib
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
from typing import ParamSpec, TextIO, TypeVar

import jax

# Subfolder of a run's folder, with one file for each start of each process.
SUBFOLDER = "goodput"
# Environment variable with the folder of a run, which starts the recording.
FOLDER_VARIABLE = "TPUDIST_GOODPUT"
_INTERVAL_S = 1.0
# Long pauses between two calls are recorded individually: those above this limit, and above
# `_GAP_FACTOR` times the median pause.
_GAP_S = 0.2
_GAP_FACTOR = 4.0
# Environment variable with the time, in seconds since 1970, at which this program replaced another
# one in the same process (`exec`).
REPLACED_AT = "TPUDIST_REPLACED_AT"
_REMEMBERED = 32  # recent calls in memory
# The beginnings of the first calls are all recorded; then as many in each octave (see `stride_of`),
# so the file of a long run stays small.
_ALL_CALLS = 64


P = ParamSpec("P")
T = TypeVar("T")


class Phase(enum.Enum):
    """Activity of the main thread."""

    STARTUP = "start"
    COMPILE = "compile"
    INPUT = "input"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    WAIT = "wait for others"


class _Recorder:
    """Recorder of this process. `_lock` protects the file, and the sums of seconds."""

    def __init__(self, file: TextIO, process: int, num_processes: int):
        self._file = file
        self._thread_id = threading.get_ident()
        # Open phases, and when each was entered. Only the recorded thread changes the list. The
        # writer's thread reads its end, so it is never empty: the first phase is STARTUP, and STEP
        # after the first call.
        self._stack = [(Phase.STARTUP, 0.0)]
        self._lock = threading.Lock()
        self._seconds: dict[Phase, float] = dict.fromkeys(Phase, 0.0)
        began = _time_of_start()
        self._seconds[Phase.STARTUP] = time.time() - began
        self._last = time.perf_counter()  # `_seconds` reach to this moment
        self._written: dict[Phase, float] = dict.fromkeys(Phase, 0.0)
        # Recent calls: their numbers and beginnings, and the pauses before them. Calls below
        # `_num_noted` are in a "gap" record.
        self._begins: collections.deque[tuple[int, float]] = collections.deque(maxlen=_REMEMBERED)
        self._pauses: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._num_noted = 0
        # End and seconds of recent outermost phases, which `move` leaves out.
        self._inner: collections.deque[tuple[float, float]] = collections.deque(maxlen=_REMEMBERED)
        self.calls = 0
        # Number of the call before which a change of processes is over; -1 without a change.
        self._resumes_at = -1
        self._closing = threading.Event()
        self.note(
            "start",
            process=process,
            processes=num_processes,
            began=began,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        self.write()
        self._thread = threading.Thread(target=self._write_often, name="goodput", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this is the thread whose time is recorded."""
        return threading.get_ident() == self._thread_id

    def follow_thread(self) -> None:
        """Records the time of this thread from now on."""
        self._count()
        self._thread_id = threading.get_ident()
        self._stack = [(Phase.STARTUP, 0.0)]
        self._resumes_at = self.calls + 1 if self.calls else -1

    def enter(self, phase: Phase) -> None:
        """Opens a phase."""
        self._count()
        self._stack.append((phase, self._last))

    def leave(self) -> None:
        """Closes the innermost phase."""
        self._count()
        _, entered = self._stack.pop()
        if len(self._stack) == 1:  # an outermost phase, which contains the phases inside it
            self._inner.append((self._last, self._last - entered))

    def move(self, seconds: float, phase: Phase) -> None:
        """Counts the last `seconds` for another phase, without the phases that ended in them.

        Whether a call compiled is known only after it.
        """
        self._count()
        began = self._last - seconds
        seconds -= sum(inner for ended, inner in self._inner if ended > began)
        # The first step begins in the startup phase, so some of its time may have been counted
        # there. No phase becomes negative.
        with self._lock:
            for source in (self._stack[-1][0], Phase.STARTUP):
                moved = max(0.0, min(seconds, self._seconds[source]))
                self._seconds[source] -= moved
                self._seconds[phase] += moved
                seconds -= moved

    def begin_call(self) -> None:
        """Records that a program of all replicas is about to be dispatched."""
        if self._stack[0][0] is Phase.STARTUP:
            self._count()
            self._stack[0] = (Phase.STEP, self._last)
        if self.calls == self._resumes_at:  # the first call of this thread has ended
            self.note("resume")
        call, began = self.calls, time.time()
        pause = began - self._begins[-1][1] if self._begins else 0.0
        self._begins.append((call, began))
        self.calls += 1
        if pause > _GAP_S and self._pauses:
            if pause > _GAP_FACTOR * statistics.median(self._pauses):
                self._note_begins()
        self._pauses.append(pause)
        # Two consecutive calls per stride: `diagnosis` needs a call and the next one.
        if call % stride_of(call) < 2:
            self.note("call", call=call, began=began)

    def note(self, kind: str, **facts: object) -> None:
        """Writes a record."""
        line = json.dumps({"kind": kind, "time": time.time(), **facts})
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        """Writes the last records."""
        self._closing.set()
        self._thread.join(2 * _INTERVAL_S)
        self.write()
        self.note("end")
        with self._lock:
            self._file.close()

    def _note_begins(self) -> None:
        # Other processes wait for this one a few calls later, so the beginnings of the recent calls
        # are needed to compare.
        new = [x for x in self._begins if x[0] >= self._num_noted]
        self._num_noted = self.calls
        self.note("gap", begins=new)

    def _count(self) -> None:
        now = time.perf_counter()
        with self._lock:
            self._seconds[self._stack[-1][0]] += now - self._last
            self._last = now

    def _write_often(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            self.write()

    def write(self) -> None:
        """Writes the seconds of each phase since the last time."""
        self._count()
        with self._lock:
            spent = {x.value: round(self._seconds[x] - self._written[x], 6) for x in Phase}
            self._written = dict(self._seconds)
        seconds = {name: s for name, s in spent.items() if s}
        self.note("time", seconds=seconds, calls=self.calls)


def stride_of(call: int) -> int:
    """Returns the number of calls, near this one, per two calls whose beginnings are recorded."""
    # A power of two that doubles when the number of the call doubles: 1 up to call 127, then 2 up
    # to call 255, then 4.
    return 1 << max(0, (call // _ALL_CALLS).bit_length() - 1)


recorder: _Recorder | None = None


# `atexit` calls functions in the reverse order of their registration. This module is imported
# early, so functions that wait at the end of a program run before this one.
@atexit.register
def close() -> None:
    """Writes the last records, at the end of the program."""
    if recorder is not None:
        recorder.close()


def current_recorder() -> _Recorder | None:
    """Returns the recorder of this process; None in other threads, or if nothing is recorded."""
    return recorder if recorder is not None and recorder.is_here else None


class phase:
    """Context in which time counts for a phase, if time is recorded."""

    __slots__ = ("_phase", "_recorder")

    def __init__(self, phase: Phase):
        self._phase = phase

    def __enter__(self) -> None:
        """Opens the phase."""
        self._recorder = current_recorder()
        if self._recorder is not None:
            self._recorder.enter(self._phase)

    def __exit__(self, *_: object) -> None:
        """Closes the phase, unless another thread has been followed since it was opened."""
        # That thread has its own open phases. This one was left behind, and ends some time later.
        if self._recorder is not None and self._recorder.is_here:
            self._recorder.leave()


def count_as(phase_of_calls: Phase) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function so that the time of its calls counts for a phase."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with phase(phase_of_calls):
                return function(*args, **kwargs)

        return call

    return decorate


def begin_call() -> None:
    """Records that a program of all replicas is about to be dispatched."""
    if recorder := current_recorder():
        recorder.begin_call()


def note(kind: str, **facts: object) -> None:
    """Records an event, from any thread."""
    if recorder is not None:
        recorder.note(kind, **facts)


def note_calls(kind: str, **facts: object) -> None:
    """Records an event with the number of program calls before it."""
    if recorder is not None:
        recorder.note(kind, calls=recorder.calls, **facts)


def follow_thread() -> None:
    """Records the time of this thread from now on, instead of another thread's."""
    if recorder is not None:
        recorder.follow_thread()


def flush() -> None:
    """Writes all records so far, from any thread."""
    if recorder is not None:
        recorder.write()


def record_if_asked() -> None:
    """Starts recording if the environment variable `TPUDIST_GOODPUT` names a folder."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        record_goodput(folder)


def record_goodput(folder: str | os.PathLike[str]) -> None:
    """Records how this process spends its time from now on, for `tpudist doctor folder`.

    Each process writes a file in `folder/goodput`, a new one after each start, of a few hundred
    bytes per second. The file has the time of the thread that calls this function. With several
    processes, call it after you create the strategy, which connects them. A second call does
    nothing. The environment variable `TPUDIST_GOODPUT=folder` has the same effect when a strategy
    is created.

    Args:
        folder: Folder of the run, the same in all processes and after each start.

    Raises:
        OSError: If the folder is not writable.
    """
    global recorder
    if recorder is not None:
        return
    process, num_processes = jax.process_index(), jax.process_count()
    records = Path(folder) / SUBFOLDER
    records.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        # Earlier starts have the first numbers; so may other programs that are process 0, too.
        with contextlib.suppress(FileExistsError):
            file = (records / f"process-{process}-{number:04}.jsonl").open("x", buffering=1)
            recorder = _Recorder(file, process, num_processes)
            return


def _time_of_start() -> float:
    """Returns the start time of this program in seconds since 1970; the current time off Linux."""
    # Usually the start of the process. A program that replaced another one started later.
    return max(_time_of_process(), float(os.environ.get(REPLACED_AT, 0)))


def _time_of_process() -> float:
    try:
        # Field 22, the start time in clock ticks since boot. The second field, the name of the
        # program in parentheses, may contain spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
