"""Compares what the processes of a run tell of themselves, and says why they cannot go on.

A report has the `state` of a process (running, ended, failed), `why` it has failed, a `beat` that
is another one in each report, the `place` where it runs (`process_state`), and for each order that
it follows the last `runs` (`run_order`) and the `names` of their numbers. Where it has begun
nothing for a while it says where it is `at`: a stack.
"""

import dataclasses
import logging
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tpudist.processes import process_state, run_order

_log = logging.getLogger("tpudist")

INTERVAL_S = 0.5
"""Between the reports of a process."""
WARN_S = 4.0
"""After which it is said that a process tells nothing, or that others wait for it."""
STOPPED_S = 20.0
"""After which all end where the kernel says that the process is stopped."""
SILENT_S = 90.0
"""After which a silent process is taken for stopped where only another host's kernel could say so.

A bit less than JAX's own 100 s, and not much less, since a long computation in C that does not let
other threads run is silent, too. The death of a process, of a host or of the network is not
waited for: see `process_lines`.
"""
HANG_VARIABLE = "TPUDIST_HANG_TIMEOUT_S"
HANG_S = 600.0
"""After which all end where one does not come to what others have begun; or that many seconds."""
EXIT_USER_ERROR = 1
EXIT_PEER_LOST = 75
"""Exit code where another process or the network has failed: start again from a checkpoint."""
ALL_ENDED = "all ended"
"""The message of the verdict that all have ended well."""
HOLD_S = 2.0
"""Before a failed collective is told of: another process may be the cause, and silent."""
_COLLECTIVE_ERROR = "JaxRuntimeError"
_BETWEEN_WARNINGS_S = 120.0
_FIRST_REPORT_S = 10.0  # within which each process that makes a strategy has told something
START_AGAIN = "Restart all processes from the last checkpoint."
_RULE = (
    "They would wait for each other forever, or compute with values of different calls. All "
    "processes of a run must do the same things in the same order."
)


class Judge:
    """Compares what processes tell."""

    def __init__(self, count: int):
        """Of `count` processes, none of which has told anything yet."""
        self._count = count
        self._heard: dict[int, tuple[float, float]] = {}
        self._moved: dict[int, tuple[dict[str, int], float]] = {}
        self._last = time.monotonic()
        self._ended_since = self._failed_since = math.inf
        self._next_warning_s, self._warned_s = WARN_S, -math.inf
        self._hang_s = hang_timeout()

    def judge(self, reports: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
        """What all are to be told: why they are to end, or that they have ended; or None."""
        silences = self._find_silences(reports)
        failed = [i for i, report in reports.items() if report["state"] == "failed"]
        if failed and (verdict := self._explain_failure(failed[0], reports, silences)):
            return verdict
        for index, report in reports.items():
            for other in range(index):
                if other in reports and (why := _compare(other, reports[other], index, report)):
                    return {"message": why, "exit_code": EXIT_USER_ERROR}
        if self._have_ended(reports):
            return {"message": ALL_ENDED, "exit_code": 0}
        for index, waited_s in silences:
            if waited_s <= WARN_S:
                break
            silence = describe_silence(index, waited_s, reports[index]["place"])
            if waited_s > silence.limit_s:
                last = _last_of(reports[index])
                return _peer_lost(index, f"{silence.text} {last}{START_AGAIN}")
            self._warn(waited_s, silence.warning)
        silent = {index for index, waited_s in silences if waited_s > WARN_S}
        behind = self._find_behind(reports, silent)
        if behind and behind[1] > WARN_S:
            index, waited_s = behind
            what = f"{_describe_lag(index, waited_s, reports)}{_where(reports[index])}"
            if waited_s > self._hang_s:
                verdict = _peer_lost(index, f"{what}\n{START_AGAIN}")
                return verdict | {"all_threads": True}
            self._warn(
                waited_s, f"{what}\nAfter {self._hang_s:g} s all processes end ({HANG_VARIABLE})."
            )
        return None

    def _warn(self, waited_s: float, text: str) -> None:
        """Says it, and again after twice the time; of one that is always slow, now and then."""
        now = time.monotonic()
        if now - self._warned_s > _BETWEEN_WARNINGS_S:
            self._next_warning_s = WARN_S
        if waited_s > self._next_warning_s:
            self._next_warning_s, self._warned_s = 2 * waited_s, now
            _log.warning("%s", text)

    def _explain_failure(
        self,
        index: int,
        reports: Mapping[int, Mapping[str, Any]],
        silences: Sequence[tuple[int, float]],
    ) -> dict[str, Any] | None:
        """Why a process has failed: for a while it is not said if another one may be the cause."""
        why = reports[index]["why"]
        if _COLLECTIVE_ERROR in why:
            self._failed_since = min(self._failed_since, time.monotonic())
            if silences and silences[0][1] >= HOLD_S:
                silent, waited_s = silences[0]
                silence = describe_silence(silent, waited_s, reports[silent]["place"])
                return _peer_lost(silent, f"{silence.text} {START_AGAIN}")
            if time.monotonic() - self._failed_since < HOLD_S + 2 * INTERVAL_S:
                return None
        return {
            "message": f"Process {index} failed, so this process cannot continue:\n{why}",
            "exit_code": reports[index].get("exit_code", EXIT_USER_ERROR),
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

    def _find_silences(self, reports: Mapping[int, Mapping[str, Any]]) -> list[tuple[int, float]]:
        """For how many seconds each running process has told nothing, the longest first."""
        now = time.monotonic()
        if now - self._last > SILENT_S / 4:  # this process itself could not listen
            self._heard.clear()
        self._last = now
        for index, report in reports.items():
            if self._heard.get(index, (None, now))[0] != report["beat"]:
                self._heard[index] = report["beat"], now
        running = [i for i, report in reports.items() if report["state"] == "running"]
        silences = [(i, now - self._heard[i][1]) for i in running]
        return sorted(silences, key=lambda x: -x[1])

    def _find_behind(
        self, reports: Mapping[int, Mapping[str, Any]], silent: Collection[int]
    ) -> tuple[int, float] | None:
        """Who, of those not silent, has not begun for longest what others have; for how long."""
        now = time.monotonic()
        lengths = {
            i: {name: run_order.length(x["runs"]) for name, x in report["orders"].items()}
            for i, report in reports.items()
        }
        for i, mine in lengths.items():
            is_behind = any(
                other.get(name, 0) > count
                for other in lengths.values()
                for name, count in mine.items()
            )
            if not is_behind or self._moved.get(i, (None, now))[0] != mine:
                self._moved[i] = mine, now
        heard = [i for i, x in reports.items() if x["state"] == "running" and i not in silent]
        return max(((i, now - self._moved[i][1]) for i in heard), key=lambda x: x[1], default=None)


@dataclasses.dataclass(frozen=True)
class Silence:
    """That a process tells nothing.

    Attributes:
        text: In words, with what its kernel says.
        limit_s: For how long that may go on.
    """

    text: str
    limit_s: float

    @property
    def warning(self) -> str:
        """With what comes of it."""
        return (
            f"{self.text} After {self.limit_s:g} s all processes end."
            if self.limit_s < math.inf
            else self.text
        )


def describe_silence(index: int, seconds: float, place: str) -> Silence:
    """Of a process that has told nothing for some seconds.

    Args:
        index: Its number.
        seconds: For how long.
        place: Where it runs; see `process_state`.
    """
    told = f"Process {index} ({process_state.describe(place)}) has not reported for {seconds:.0f} s"
    state = process_state.find(place)
    if state is None:
        why = (
            "it is stopped, its host is busy or unreachable, or it runs C code that does not "
            "release Python's lock."
        )
    elif state is process_state.State.STOPPED:
        return Silence(f"{told}: it was stopped by SIGSTOP or Ctrl-Z.", STOPPED_S)
    elif state is process_state.State.DEBUGGED:
        return Silence(f"{told}: a debugger has stopped it.", math.inf)
    elif state is process_state.State.GONE:
        return Silence(f"{told}: it no longer exists.", 0.0)
    else:
        why = (
            "it runs C code that does not release Python's lock, or its host is busy or "
            "unreachable."
        )
    return Silence(f"{told}: {why}", SILENT_S)


def hang_timeout() -> float:
    """For how many seconds others may wait for one process; `HANG_VARIABLE` changes it.

    Raises:
        ValueError: It is no positive number.
    """
    text = os.environ.get(HANG_VARIABLE, "")
    if not text:
        return HANG_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(
            f"{HANG_VARIABLE}={text!r} must be a number of seconds above 0. Use such a number, or "
            f"inf to wait forever."
        )
    return seconds


def _peer_lost(index: int, message: str) -> dict[str, Any]:
    return {"message": message, "exit_code": EXIT_PEER_LOST, "failed": index}


def _describe_lag(index: int, seconds: float, reports: Mapping[int, Mapping[str, Any]]) -> str:
    """That others wait for a process, and in what."""
    report = reports[index]
    for name, order in report["orders"].items():
        mine = run_order.length(order["runs"])
        for other, theirs in reports.items():
            there = theirs["orders"].get(name)
            if there and run_order.length(there["runs"]) > mine:
                number = next(
                    (n for n, start, times in there["runs"] if mine < start + times), None
                )
                what = there["names"].get(str(number), "a shared call")
                who = f"process {index} ({process_state.describe(report['place'])})"
                return (
                    f"Process {other} has waited {seconds:.0f} s for {who} to start {what} (call "
                    f"{mine + 1})."
                )
    return f"Other processes have waited {seconds:.0f} s for process {index}."


def _where(report: Mapping[str, Any]) -> str:
    at = report.get("at", "").rstrip()
    return f" It is at:\n{at}" if at else ""


def _compare(i: int, one: Mapping[str, Any], j: int, other: Mapping[str, Any]) -> str:
    """In what two processes differ; empty if in nothing that is known yet."""
    for name in one["orders"].keys() & other["orders"].keys():
        a, b = one["orders"][name], other["orders"][name]
        names = {**a["names"]}, {**b["names"]}
        found = run_order.first_difference(a["runs"], b["runs"])
        if found is not None:
            position, x, y = found
            return (
                f"The processes differ at call {position + 1} of their shared calls. Process {i}: "
                f"{names[0][str(x)]}; Process {j}: {names[1][str(y)]}. {_RULE}"
            )
        for (k, ended), (m, going) in (((i, one), (j, other)), ((j, other), (i, one))):
            if ended["state"] != "ended":
                continue
            few, many = (run_order.length(x["orders"][name]["runs"]) for x in (ended, going))
            if few < many:
                return (
                    f"Process {k} ended after {few} shared call(s), but process {m} has started "
                    f"{many}. {_last_of(going)}{_RULE} Loops must have the same length, as loops "
                    f"over distributed datasets do."
                )
    return ""


def _last_of(report: Mapping[str, Any]) -> str:
    told = [
        f"{order['names'][str(order['runs'][-1][0])]} (call {run_order.length(order['runs'])})"
        for order in report["orders"].values()
        if order["runs"]
    ]
    return f"Its last calls: {', '.join(told)}. " if told else ""
