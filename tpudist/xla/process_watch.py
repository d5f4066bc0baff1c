"""Watches the processes of a run, so that none waits for ever for another one, and none is silent.

Each process tells twice a second, on the host and from a thread of its own, what it has begun
(`run_order`), whether it has ended, and of an exception that ends it. Process 0 compares. Where two
have begun different things at the same place, where one has ended and others go on, has raised, or
is not heard of any more, all are told, say so, and end: the collectives that they wait in would not
return. Nothing is added to a step but a count.
"""

import atexit
import ctypes
import functools
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tpudist.errors import ProcessesDifferError, ProcessFailedError
from tpudist.xla import internals, run_order
from tpudist.xla.process_lines import Lines
from tpudist.xla.run_order import RunOrder

_log = logging.getLogger("tpudist")

INTERVAL_S = 0.5
WARN_S = 30.0
"""After which it is said that a process tells nothing."""
SILENT_S = 90.0
"""After which such a process is taken for dead or stopped: a bit less than JAX's own 100 s.

Not much less, since a long computation in C that does not let other threads run is silent, too.
"""
GRACE_S = 2.0
"""Between the exception that is raised in a process that is to end, and its end."""
EXIT_USER_ERROR = 1
EXIT_PEER_LOST = 75
"""Exit code where another process or the network has failed: start again from a checkpoint."""
_REPORTS_PER_S = 1000  # which process 0 reads
_FIRST_REPORT_S = 10.0  # within which each process that makes a strategy has told something
_WAIT_MS = 1000
_ALL_ENDED = "all ended"
_COLLECTIVE_ERROR = "JaxRuntimeError"
_HOLD_S = 2.0  # before a failed collective is told of: another process may be the cause, and silent


@functools.cache
def watch() -> "Watch":
    """That of this process; the first call starts it. All processes must call it."""
    return Watch()


class Watch:
    """What this process tells the others, and what it is told.

    Attributes:
        message: Why this process is to end; empty while all is well.
    """

    def __init__(self):
        """Starts to tell and to listen."""
        self.message = ""
        self._exit_code = EXIT_USER_ERROR
        self._client, self._index = internals.coordination_client(), jax.process_index()
        self._count = jax.process_count()
        self._orders: dict[str, tuple[RunOrder, Callable[[int], str]]] = {}
        self._state, self._why = "running", ""
        self._ended_together = threading.Event()
        self._closing = threading.Event()
        self._judge = _Judge(self._count)
        self._lines = Lines(self._index, self._on_lost)
        self._interval_s = INTERVAL_S + self._count / _REPORTS_PER_S
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        self._threads = [
            threading.Thread(target=self._report_often, name="tpudist watch", daemon=True),
            threading.Thread(target=self._listen, name="tpudist watch, told", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._at_exit)

    def follow(self, name: str, order: RunOrder, describe: Callable[[int], str]) -> None:
        """Tells of an order too, which all the processes in it know by the same name.

        Args:
            name: Of the order.
            order: What this process has begun.
            describe: What a number in it stands for, in words.
        """
        self._orders[name] = order, describe

    # Telling.

    def _report_often(self) -> None:
        while True:
            report = self._describe()
            try:
                self._send(report)
            except Exception:  # the type varies; `_listen` finds out whether the service is gone
                pass
            if self._closing.wait(self._interval_s):
                return

    def _describe(self) -> dict[str, Any]:
        """What this process has begun, and how it is."""
        orders = {}
        for name, (order, describe) in list(self._orders.items()):
            runs = order.last_runs()
            orders[name] = {"runs": runs, "names": {x: describe(x) for x in {r[0] for r in runs}}}
        return {"state": self._state, "why": self._why, "orders": orders, "beat": time.time()}

    def _send(self, report: dict[str, Any]) -> None:
        """And where all meet, what follows from the reports of all."""
        key = f"tpudist/watch/report/{self._index}"
        self._client.key_value_set(key, json.dumps(report), allow_overwrite=True)
        if self._index:
            return
        found = self._client.key_value_dir_get("tpudist/watch/report/")
        reports = {int(key.rsplit("/", 1)[-1]): json.loads(text) for key, text in found}
        verdict = self._judge.judge(reports)
        if verdict is not None:
            self._pronounce(verdict)

    def _pronounce(self, verdict: Mapping[str, Any]) -> None:
        for i in range(self._count):
            key = f"tpudist/watch/verdict/{i}"
            self._client.key_value_set(key, json.dumps(verdict), allow_overwrite=True)

    # Listening.

    def _open_lines(self) -> None:
        """So that a killed process is noticed at once; without them, when it is silent."""
        host, key = internals.coordinator_host(), "tpudist/watch/lines"
        try:
            if self._index:
                where = self._client.blocking_key_value_get(key, 20 * _WAIT_MS)
                self._lines.connect(host, where)
            else:
                self._client.key_value_set(key, self._lines.listen(host), True)
        except Exception as error:  # of the network, or the service; the type varies
            _log.info("Process %d has no line to the others: %s", self._index, error)

    def _on_lost(self, index: int) -> None:
        """Another process was killed: all are told, unless they end already."""
        if self.message or self._closing.is_set() or self._has_left():
            return
        verdict = {
            "message": f"Process {index} has ended without a word: it was killed (by SIGKILL, for "
            f"want of memory), or has left by os._exit. Start all processes again, from the last "
            f"checkpoint.",
            "exit_code": EXIT_PEER_LOST,
            "failed": index,
        }
        if self._index:  # it was the first one: JAX is about to abort this one
            _write(f"tpudist, process {self._index}: {verdict['message']}")
            _exit(EXIT_PEER_LOST)
        try:
            self._pronounce(verdict)
        except Exception:  # this process ends, too; the type varies
            pass

    def _listen(self) -> None:
        self._open_lines()
        key = f"tpudist/watch/verdict/{self._index}"
        while not self._closing.is_set():
            try:
                verdict = json.loads(self._client.blocking_key_value_get(key, _WAIT_MS))
            except Exception as error:  # the type varies; the text says what happened
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                if self._closing.wait(self._interval_s) or self._has_left():
                    return
                verdict = {
                    "message": f"Process 0, where the processes of this run meet, cannot be "
                    f"reached any more ({str(error).splitlines()[0][:200]}). It was killed, or the "
                    f"network has failed. Start all processes again, from the last checkpoint.",
                    "exit_code": EXIT_PEER_LOST,
                    "failed": 0,
                }
            if verdict["message"] == _ALL_ENDED:
                self._ended_together.set()
                return
            self._end(verdict)
            return

    def _end(self, verdict: Mapping[str, Any]) -> None:
        """Raises in the main thread, which may not be able to; then the process ends."""
        message = verdict["message"]
        if verdict.get("failed") != self._index:  # that one's own traceback has been shown
            _write(f"tpudist, process {self._index}: {message}")
        self._exit_code, self.message = verdict["exit_code"], message
        if self._state == "running":
            differ = "failed" not in verdict
            _raise_in_main_thread(ProcessesDifferError if differ else ProcessFailedError, message)
        time.sleep(GRACE_S)
        self._leave()

    def _close(self) -> None:
        """Ends the threads: of one that is in C++ when Python ends, the process would abort."""
        self._closing.set()
        self._lines.close()
        for thread in self._threads:
            thread.join(3 * _WAIT_MS / 1000)

    def _has_left(self) -> bool:
        """Whether the program itself has left the others, by `jax.distributed.shutdown`."""
        return internals.coordination_client() is not self._client

    def _leave(self) -> None:
        """Ends this process; that in which all meet at last, as JAX ends those that lose it."""
        try:
            if self._index:
                self._client.key_value_set(f"tpudist/watch/gone/{self._index}", "", True)
            else:
                deadline = time.monotonic() + GRACE_S + 0.5  # a dead one does not say that it goes
                while time.monotonic() < deadline:
                    if (
                        len(self._client.key_value_dir_get("tpudist/watch/gone/"))
                        >= self._count - 1
                    ):
                        break
                    time.sleep(0.05)
                time.sleep(0.2)
        except Exception:  # the service is gone; the type varies
            pass
        _exit(self._exit_code)

    # The end of this process.

    def _on_exception(self, kind: type[BaseException], error: BaseException, where: Any) -> None:
        self._excepthook(kind, error, where)
        if self._state == "running" and not self.message:
            self._why = "".join(traceback.format_exception(kind, error, where))[-6000:]
            self._state = "failed"

    def _at_exit(self) -> None:
        """Waits until all have ended, or it is told why they cannot: JAX would wait for minutes."""
        if self._has_left():
            self._close()
            return
        if self._state == "running":
            self._state = "ended"
        start, next_report_s = time.monotonic(), 10.0
        while not self._ended_together.wait(0.02):
            waited_s = time.monotonic() - start
            if self.message:
                break
            if self._state == "failed" and waited_s > _HOLD_S + 3 * self._interval_s + GRACE_S:
                break
            if waited_s > next_report_s:
                next_report_s *= 2
                _log.warning(
                    "Process %d has ended and waits for the others to: %.0f s.",
                    self._index,
                    waited_s,
                )
        if self._ended_together.is_set():
            self._close()
            return
        self._leave()


class _Judge:
    """Compares what processes tell."""

    def __init__(self, count: int):
        self._count = count
        self._heard: dict[int, tuple[float, float]] = {}
        self._last = time.monotonic()
        self._ended_since = self._failed_since = math.inf
        self._warned: set[int] = set()

    def judge(self, reports: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
        """What all are to be told: why they are to end, or that they have ended; or None."""
        silent = self._find_silent(reports)
        failed = [i for i, report in reports.items() if report["state"] == "failed"]
        if failed and (verdict := self._explain_failure(failed[0], reports)):
            return verdict
        for index, report in reports.items():
            for other in range(index):
                if other in reports and (why := _compare(other, reports[other], index, report)):
                    return {"message": why, "exit_code": EXIT_USER_ERROR}
        if self._have_ended(reports):
            return {"message": _ALL_ENDED, "exit_code": 0}
        if silent and silent[1] > SILENT_S:
            return _describe_silence(*silent, reports)
        if silent and silent[1] > WARN_S and silent[0] not in self._warned:
            self._warned.add(silent[0])
            _log.warning(
                "Process %d has told nothing for %.0f s; at %g s all end.", *silent, SILENT_S
            )
        return None

    def _explain_failure(
        self, index: int, reports: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Why a process has failed: for a while it is not said if another one may be the cause."""
        why = reports[index]["why"]
        if _COLLECTIVE_ERROR in why:
            self._failed_since = min(self._failed_since, time.monotonic())
            silent = self._find_silent(reports)
            if silent and silent[1] >= _HOLD_S:
                return _describe_silence(*silent, reports)
            if time.monotonic() - self._failed_since < _HOLD_S + 2 * INTERVAL_S:
                return None
        return {
            "message": f"Process {index} has failed, so that this one cannot go on:\n{why}",
            "exit_code": EXIT_USER_ERROR,
            "failed": index,
        }

    def _have_ended(self, reports: Mapping[int, Mapping[str, Any]]) -> bool:
        if not all(x["state"] == "ended" for x in reports.values()):
            self._ended_since = math.inf
            return False
        self._ended_since = min(self._ended_since, time.monotonic())
        # Those that have never told anything do nothing together with others.
        is_long_ago = time.monotonic() - self._ended_since > _FIRST_REPORT_S
        return len(reports) == self._count or is_long_ago

    def _find_silent(self, reports: Mapping[int, Mapping[str, Any]]) -> tuple[int, float] | None:
        """The running process that has told nothing for longest, and for how many seconds."""
        now = time.monotonic()
        if now - self._last > SILENT_S / 4:  # this process itself could not listen
            self._heard.clear()
        self._last = now
        for index, report in reports.items():
            if self._heard.get(index, (None, now))[0] != report["beat"]:
                self._heard[index] = report["beat"], now
        running = [i for i, report in reports.items() if report["state"] == "running"]
        silences = [(i, now - self._heard[i][1]) for i in running]
        return max(silences, key=lambda x: x[1], default=None)


def _describe_silence(
    index: int, seconds: float, reports: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "message": f"Process {index} has told nothing for {seconds:.0f} s: it was killed or "
        f"stopped, or its host or network has failed. {_last_of(reports[index])}Start all "
        f"processes again, from the last checkpoint.",
        "exit_code": EXIT_PEER_LOST,
        "failed": index,
    }


def _compare(i: int, one: Mapping[str, Any], j: int, other: Mapping[str, Any]) -> str:
    """In what two processes differ; empty if in nothing that is known yet."""
    for name in one["orders"].keys() & other["orders"].keys():
        a, b = one["orders"][name], other["orders"][name]
        names = {**a["names"]}, {**b["names"]}
        found = run_order.first_difference(a["runs"], b["runs"])
        if found is not None:
            position, x, y = found
            return (
                f"The processes do different things at call {position + 1} of what they do "
                f"together. Process {i}: {names[0][str(x)]}; Process {j}: {names[1][str(y)]}. "
                f"{_RULE}"
            )
        for (k, ended), (m, going) in (((i, one), (j, other)), ((j, other), (i, one))):
            if ended["state"] != "ended":
                continue
            few, many = (run_order.length(x["orders"][name]["runs"]) for x in (ended, going))
            if few < many:
                return (
                    f"Process {k} has ended after {few} call(s) of what the processes do together, "
                    f"and process {m} has begun {many}. {_last_of(going)}{_RULE} Loops must be of "
                    f"the same length: those over distributed datasets are."
                )
    return ""


_RULE = (
    "They would wait for each other for ever, or compute with each other's numbers. All processes "
    "of a run must do the same things in the same order."
)


def _last_of(report: Mapping[str, Any]) -> str:
    told = [
        f"{order['names'][str(order['runs'][-1][0])]} (call {run_order.length(order['runs'])})"
        for order in report["orders"].values()
        if order["runs"]
    ]
    return f"Its last: {', '.join(told)}. " if told else ""


def _raise_in_main_thread(kind: type[RuntimeError], message: str) -> None:
    """At its next line of Python; what waits in C++ goes on to wait."""

    def __str__(self: RuntimeError) -> str:  # the class alone is given, without arguments
        return message

    members = {"__str__": __str__, "__module__": kind.__module__}
    error = type(kind.__name__, (kind,), members)
    main = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(error))


def _write(text: str) -> None:
    try:
        sys.stderr.write(text.rstrip() + "\n")
        sys.stderr.flush()
    except Exception:  # closed, as by a notebook; there is nobody to tell then
        pass


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os._exit(code)
