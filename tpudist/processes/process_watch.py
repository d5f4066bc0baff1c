"""Watches the processes of a run, so that none waits for ever for another one, and none is silent.

Each process tells twice a second, on the host and from a thread of its own, what it has begun
(`run_order`), whether it has ended, and of an exception that ends it. Process 0 compares. Where two
have begun different things at the same place, where one has ended and others go on, has raised, or
is not heard of any more, all are told, say so, and end: the collectives that they wait in would not
return. Nothing is added to a step but a count.
"""

import atexit
import faulthandler
import functools
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tpudist.errors import ProcessesDifferError, ProcessFailedError
from tpudist.goodput import goodput
from tpudist.processes import generations, preemption_service, process_state, run_order
from tpudist.processes.process_judge import (
    ALL_ENDED,
    EXIT_PEER_LOST,
    EXIT_USER_ERROR,
    HOLD_S,
    INTERVAL_S,
    START_AGAIN,
    WARN_S,
    Judge,
    describe_silence,
)
from tpudist.processes.process_lines import Lines
from tpudist.processes.run_order import RunOrder
from tpudist.xla import internals

_log = logging.getLogger("tpudist")

GRACE_S = 2.0
"""Between the exception that is raised in a process that is to end, and its end."""
_REPORTS_PER_S = 1000  # which process 0 reads
_WAIT_MS = 1000


@functools.cache
def watch() -> "Watch":
    """That of this process; the first call starts it. All processes must call it."""
    return Watch()


@generations.at_end
def _end_watch() -> None:
    if watch.cache_info().currsize:
        watch().abandon()
        watch.cache_clear()


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
        self._state, self._why, self._failure_code = "running", "", EXIT_USER_ERROR
        self._place, self._place_of_first = process_state.here(), ""
        self._lengths, self._moved_s = {}, time.monotonic()
        self._next_warning_s = WARN_S
        self._ended_together = threading.Event()
        self._closing = threading.Event()
        self._judge = Judge(self._count)  # also where another one judges: a wrong setting is said
        self._lines = Lines(self._index, self._on_lost)
        self._interval_s = INTERVAL_S + self._count / _REPORTS_PER_S
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        self._threads = [
            threading.Thread(target=self._report_often, name="tpudist watch", daemon=True),
            threading.Thread(target=self._listen, name="tpudist watch, told", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        preemption_service.SigtermHandler(self._on_sigterm)
        atexit.register(self._at_exit)

    def follow(self, name: str, order: RunOrder, describe: Callable[[int], str]) -> None:
        """Tells of an order too, which all the processes in it know by the same name.

        Args:
            name: Of the order.
            order: What this process has begun.
            describe: What a number in it stands for, in words.
        """
        self._orders[name] = order, describe

    def abandon(self) -> None:
        """Watches no more: the processes of the run are others now."""
        self._closing.set()
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook

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
        report = {
            "state": self._state,
            "why": self._why,
            "exit_code": self._failure_code,
            "orders": orders,
            "beat": time.time(),
            "place": self._place,
        }
        lengths = {name: run_order.length(x["runs"]) for name, x in orders.items()}
        if lengths != self._lengths:
            self._lengths, self._moved_s = lengths, time.monotonic()
        elif time.monotonic() - self._moved_s > WARN_S / 2:  # others may want to know why
            report["at"] = _stack_of_program()
        return report

    def _send(self, report: dict[str, Any]) -> None:
        """And where all meet, what follows from the reports of all."""
        key = f"tpudist/watch/report/{self._index}"
        self._client.key_value_set(key, json.dumps(report), allow_overwrite=True)
        if self._index:
            return
        found = self._client.key_value_dir_get("tpudist/watch/report/")
        reports = {int(key.rsplit("/", 1)[-1]): json.loads(text) for key, text in found}
        verdict = self._judge.judge(reports)
        if verdict is not None and not self._ask_supervisor(verdict):
            self._pronounce(verdict)

    def _ask_supervisor(self, verdict: Mapping[str, Any]) -> bool:
        """Lets a supervisor end the process that all wait for; the others go on without it."""
        if verdict["exit_code"] != EXIT_PEER_LOST:
            return False
        return generations.report_lost(verdict["failed"], verdict["message"])

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
                text = self._client.blocking_key_value_get(key, 20 * _WAIT_MS)
                where, self._place_of_first = json.loads(text)
                self._lines.connect(host, where)
            else:
                where = self._lines.listen(host)
                self._client.key_value_set(key, json.dumps([where, self._place]), True)
        except Exception as error:  # of the network, or the service; the type varies
            _log.info("Process %d has no connection to the others: %s", self._index, error)

    def _on_lost(self, index: int) -> None:
        """Another process was killed: all are told, unless they end already."""
        if self.message or self._closing.is_set() or self._has_left():
            return
        verdict = {
            "message": f"Process {index} ended without a message: it was killed (by SIGKILL, or "
            f"out of memory), it called os._exit, or its host or network failed. {START_AGAIN}",
            "exit_code": EXIT_PEER_LOST,
            "failed": index,
        }
        if self._index:  # it was the first one: JAX is about to abort this one
            _write(f"[tpudist p{self._index}] {verdict['message']}")
            _exit(EXIT_PEER_LOST)
        try:
            self._pronounce(verdict)
        except Exception:  # this process ends, too; the type varies
            pass

    def _listen(self) -> None:
        if not generations.is_supervised():  # a supervisor notices it, and all are to go on
            self._open_lines()
        key = f"tpudist/watch/verdict/{self._index}"
        while not self._closing.is_set():
            try:
                verdict = json.loads(self._client.blocking_key_value_get(key, _WAIT_MS))
            except Exception as error:  # the type varies; the text says what happened
                if "DEADLINE_EXCEEDED" in str(error):
                    verdict = self._judge_first()
                    if verdict and not self._ask_supervisor(verdict):
                        self._end(verdict)
                        return
                    continue
                if self._closing.wait(self._interval_s) or self._has_left():
                    return
                verdict = {
                    "message": f"Cannot reach process 0, which coordinates this run "
                    f"({str(error).splitlines()[0][:200]}). It was killed, or the network "
                    f"failed. {START_AGAIN}",
                    "exit_code": EXIT_PEER_LOST,
                    "failed": 0,
                }
            if verdict["message"] == ALL_ENDED:
                self._ended_together.set()
                return
            self._end(verdict)
            return

    def _judge_first(self) -> dict[str, Any] | None:
        """Of the first process, which cannot say itself that it is silent: why to end, or None."""
        waited_s = self._lines.silence_s()
        if waited_s <= WARN_S:
            self._next_warning_s = WARN_S
            return None
        silence = describe_silence(0, waited_s, self._place_of_first)
        if waited_s > silence.limit_s:
            message = f"{silence.text} {START_AGAIN}"
            return {"message": message, "exit_code": EXIT_PEER_LOST, "failed": 0, "silent": True}
        if waited_s > self._next_warning_s:
            self._next_warning_s = 2 * waited_s
            _log.warning("%s", silence.warning)
        return None

    def _end(self, verdict: Mapping[str, Any]) -> None:
        """Raises in the main thread, which may not be able to; then the process ends."""
        message = verdict["message"]
        # The traceback of an exception of this process has been shown.
        if verdict.get("failed") != self._index or self._state != "failed":
            _write(f"[tpudist p{self._index}] {message}")
        self._exit_code, self.message = verdict["exit_code"], message
        goodput.flush()
        goodput.note("verdict", message=message)
        if self._state == "running":
            _write(f"Process {self._index} was at:\n{_stack_of_program()}")
            if verdict.get("all_threads"):
                _write_all_threads()
            differ = "failed" not in verdict
            _raise_in_program(ProcessesDifferError if differ else ProcessFailedError, message)
        time.sleep(GRACE_S)
        if verdict.get("silent"):  # who would have to listen to what is said at the end
            _exit(self._exit_code)
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

    def _on_sigterm(self) -> None:
        """This process ends now: by `SystemExit`, of which the others would know nothing."""
        if self._state == "running" and not self.message:
            _write(
                f"[tpudist p{self._index}] SIGTERM. This program does not handle it, so "
                f"the process ends now. With PreemptionCheckpointHandler it would first save its "
                f"state."
            )
            self._why = "SIGTERM: it received a request to end."
            self._failure_code = preemption_service.EXIT_PREEMPTED
            self._state = "failed"

    def _at_exit(self) -> None:
        """Waits until all have ended, or it is told why they cannot: JAX would wait for minutes."""
        if self._has_left():
            self._close()
            return
        if self._state == "running":
            self._state = "ended"
        self._wait_for_the_others()
        if self._ended_together.is_set():
            self._close()
            return
        self._leave()

    @goodput.count_as(goodput.Phase.WAIT)
    def _wait_for_the_others(self) -> None:
        start, next_report_s = time.monotonic(), 5.0
        while not self._ended_together.wait(0.02):
            waited_s = time.monotonic() - start
            if self.message:
                break
            if self._state == "failed" and waited_s > HOLD_S + 3 * self._interval_s + GRACE_S:
                break
            if waited_s > next_report_s:
                next_report_s *= 2
                _log.warning(
                    "Process %d has ended and waits for the others to end: %.0f s.",
                    self._index,
                    waited_s,
                )


def _raise_in_program(kind: type[RuntimeError], message: str) -> None:
    """At its next line of Python; what waits in C++ goes on to wait."""

    def __str__(self: RuntimeError) -> str:  # the class alone is given, without arguments
        return message

    members = {"__str__": __str__, "__module__": kind.__module__}
    error = type(kind.__name__, (kind,), members)
    generations.raise_in(generations.program_thread(), error)


def _stack_of_program() -> str:
    """Where it is, the users' lines and those of libraries; of one in C++, what called that."""
    frame = sys._current_frames().get(generations.program_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-12:]) if frame else "  (an unknown place)\n"


def _write_all_threads() -> None:
    try:
        faulthandler.dump_traceback(2, all_threads=True)  # stderr, wherever Python writes
    except Exception:  # closed, or no file: there is nobody to tell then
        pass


def _write(text: str) -> None:
    try:
        sys.stderr.write(text.rstrip() + "\n")
        sys.stderr.flush()
    except Exception:  # closed, as by a notebook; there is nobody to tell then
        pass


def _exit(code: int) -> None:
    goodput.flush()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os._exit(code)
