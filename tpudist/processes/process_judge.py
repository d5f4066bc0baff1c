"""Compares the reports of all processes, and decides whether and why the run cannot continue.

Runs in process 0 (`process_watch`). It does no communication: `Judge.judge` maps reports and the
clock to a verdict, so tests can move the clock.
"""

import logging
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence

from tpudist.processes import process_state, run_order
from tpudist.processes.exit_codes import EXIT_PEER_LOST, EXIT_USER_ERROR
from tpudist.processes.process_reports import ALL_ENDED, OrderReport, Report, Verdict
from tpudist.processes.process_silence import SILENT_S, WARN_S, describe_silence

_log = logging.getLogger("tpudist")

INTERVAL_S = 0.5
"""Seconds between two reports of a process."""
HANG_VARIABLE = "TPUDIST_HANG_TIMEOUT_S"
HANG_S = 600.0
"""Seconds that others may wait for one process until all end; `HANG_VARIABLE` overrides it."""
HOLD_S = 2.0
"""Seconds for which a failed collective is not reported: another process may be the cause."""
# The exception of a collective whose peer is gone. It is a symptom, so the cause gets `HOLD_S` to
# become known: a process that raised reports within `INTERVAL_S`, a stopped one is silent.
_COLLECTIVE_ERROR = "JaxRuntimeError"
# Each warning doubles the time until the next one. After this many seconds without a warning the
# time starts at `WARN_S` again, so that a process that is always slow is reported now and then.
_BETWEEN_WARNINGS_S = 120.0
# Seconds between two calls of `judge` from which on this process itself was stopped, or busy.
_SELF_STOPPED_S = SILENT_S / 4
_FIRST_REPORT_S = 10.0  # within which each process that creates a strategy has reported
START_AGAIN = "Restart all processes from the last checkpoint."
_RULE = (
    "They would wait for each other forever, or compute with values of different calls. All "
    "processes of a run must do the same things in the same order."
)

Reports = Mapping[int, Report]


class Judge:
    """Compares the reports of `count` processes.

    A process that has not reported yet is missing in the reports, and is not waited for here:
    the rendezvous has done that.
    """

    def __init__(self, count: int):
        self._count = count
        # Last beat of each process, and when it was first seen. The clocks of hosts may differ, so
        # beats are only compared for equality.
        self._heard: dict[int, tuple[float, float]] = {}
        # Number of shared calls of each process, and since when that is what others wait for.
        self._moved: dict[int, tuple[dict[str, int], float]] = {}
        self._last = time.monotonic()
        self._ended_since = self._failed_since = math.inf
        self._next_warning_s, self._warned_s = WARN_S, -math.inf
        self._hang_s = hang_timeout()

    def judge(self, reports: Reports) -> Verdict | None:
        """Returns the verdict for all processes, or None if they continue."""
        # In order of certainty. An exception is a cause; a difference is certain, too, and explains
        # a silence that may follow. Silence and lag are symptoms, which have time limits.
        silences = self._find_silences(reports)
        failed = [i for i, report in reports.items() if report["state"] == "failed"]
        if failed and (verdict := self._explain_failure(failed[0], reports, silences)):
            return verdict
        for index, report in reports.items():
            for other in range(index):
                if other in reports and (why := _compare(other, reports[other], index, report)):
                    return Verdict(why, EXIT_USER_ERROR)
        if self._have_ended(reports):
            return Verdict(ALL_ENDED, 0)
        return self._judge_silences(silences, reports) or self._judge_lag(silences, reports)

    def _judge_silences(
        self, silences: Sequence[tuple[int, float]], reports: Reports
    ) -> Verdict | None:
        # All of them, because the longest one may be in a debugger, which has no limit.
        for index, waited_s in silences:
            if waited_s <= WARN_S:
                break
            silence = describe_silence(index, waited_s, reports[index]["place"])
            if waited_s > silence.limit_s:
                last = _describe_last_calls(reports[index])
                return _peer_lost(index, f"{silence.text} {last}{START_AGAIN}")
            self._warn(waited_s, silence.warning)
        return None

    def _judge_lag(self, silences: Sequence[tuple[int, float]], reports: Reports) -> Verdict | None:
        silent = {index for index, waited_s in silences if waited_s > WARN_S}
        laggard = self._find_laggard(reports, silent)
        if laggard is None or laggard[1] <= WARN_S:
            return None
        index, waited_s = laggard
        text = f"{_describe_lag(index, waited_s, reports)}{_describe_stack(reports[index])}"
        if waited_s > self._hang_s:
            message = f"{text}\n{START_AGAIN}"
            return Verdict(message, EXIT_PEER_LOST, failed=index, all_threads=True)
        limit = f"After {self._hang_s:g} s all processes end ({HANG_VARIABLE})."
        self._warn(waited_s, f"{text}\n{limit}")
        return None

    def _warn(self, waited_s: float, text: str) -> None:
        """Logs a warning, and later ones after twice the time each."""
        now = time.monotonic()
        if now - self._warned_s > _BETWEEN_WARNINGS_S:
            self._next_warning_s = WARN_S
        if waited_s > self._next_warning_s:
            self._next_warning_s, self._warned_s = 2 * waited_s, now
            _log.warning("%s", text)

    def _explain_failure(
        self, index: int, reports: Reports, silences: Sequence[tuple[int, float]]
    ) -> Verdict | None:
        """Returns the verdict for a failed process; None while another may still be the cause."""
        why = reports[index]["why"]
        if _COLLECTIVE_ERROR in why:
            self._failed_since = min(self._failed_since, time.monotonic())
            if silences and silences[0][1] >= HOLD_S:
                silent, waited_s = silences[0]
                silence = describe_silence(silent, waited_s, reports[silent]["place"])
                return _peer_lost(silent, f"{silence.text} {START_AGAIN}")
            # Long enough for a process that went silent just before to be silent for `HOLD_S`.
            if time.monotonic() - self._failed_since < HOLD_S + 2 * INTERVAL_S:
                return None
        message = f"Process {index} failed, so this process cannot continue:\n{why}"
        return Verdict(message, reports[index].get("exit_code", EXIT_USER_ERROR), failed=index)

    def _have_ended(self, reports: Reports) -> bool:
        if not all(x["state"] == "ended" for x in reports.values()):
            self._ended_since = math.inf
            return False
        self._ended_since = min(self._ended_since, time.monotonic())
        # A process that has not reported for so long creates no strategy, so it takes part in
        # nothing that the others do.
        is_long_ago = time.monotonic() - self._ended_since > _FIRST_REPORT_S
        return len(reports) == self._count or is_long_ago

    def _find_silences(self, reports: Reports) -> list[tuple[int, float]]:
        """Returns each running process and the seconds since its last report, longest first."""
        now = time.monotonic()
        if now - self._last > _SELF_STOPPED_S:
            # This process was stopped itself, so it could not have heard anybody.
            self._heard.clear()
        self._last = now
        for index, report in reports.items():
            if self._heard.get(index, (None, now))[0] != report["beat"]:
                self._heard[index] = report["beat"], now
        running = [i for i, report in reports.items() if report["state"] == "running"]
        silences = [(i, now - self._heard[i][1]) for i in running]
        return sorted(silences, key=lambda x: -x[1])

    def _find_laggard(self, reports: Reports, silent: Collection[int]) -> tuple[int, float] | None:
        """Returns the process that others have waited for longest, and for how many seconds.

        Silent processes are left out: they have their own limits.
        """
        now = time.monotonic()
        lengths = {
            i: {name: run_order.length(x["runs"]) for name, x in report["orders"].items()}
            for i, report in reports.items()
        }
        # A process lags if another has begun more calls of an order that both follow. Its time
        # starts again with each call that it begins: a slow process is not a hung one.
        for i, own_lengths in lengths.items():
            is_behind = any(
                other.get(name, 0) > count
                for other in lengths.values()
                for name, count in own_lengths.items()
            )
            if not is_behind or self._moved.get(i, (None, now))[0] != own_lengths:
                self._moved[i] = own_lengths, now
        heard = [i for i, x in reports.items() if x["state"] == "running" and i not in silent]
        return max(((i, now - self._moved[i][1]) for i in heard), key=lambda x: x[1], default=None)


def hang_timeout() -> float:
    """Returns the seconds that others may wait for one process, `HANG_S` or `HANG_VARIABLE`.

    Raises:
        ValueError: If the variable is not a positive number.
    """
    text = os.environ.get(HANG_VARIABLE, "")
    if not text:
        return HANG_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:  # also nan
        raise ValueError(
            f"{HANG_VARIABLE}={text!r} must be a number of seconds above 0. Use such a number, or "
            f"inf to wait forever."
        )
    return seconds


def _peer_lost(index: int, message: str) -> Verdict:
    return Verdict(message, EXIT_PEER_LOST, failed=index)


def _describe_lag(index: int, seconds: float, reports: Reports) -> str:
    """Returns who waits for a process, and for which call."""
    report = reports[index]
    for name, order in report["orders"].items():
        own_length = run_order.length(order["runs"])
        for other, other_report in reports.items():
            other_order = other_report["orders"].get(name)
            if other_order and run_order.length(other_order["runs"]) > own_length:
                call = _name_of_call(other_order, own_length)
                laggard = f"process {index} ({process_state.describe(report['place'])})"
                return (
                    f"Process {other} has waited {seconds:.0f} s for {laggard} to start {call} "
                    f"(call {own_length + 1})."
                )
    return f"Other processes have waited {seconds:.0f} s for process {index}."


def _name_of_call(order: OrderReport, position: int) -> str:
    """Returns the description of the call at or after a position, if it is remembered."""
    number = next((n for n, start, times in order["runs"] if position < start + times), None)
    return order["names"].get(str(number), "a shared call")


def _describe_stack(report: Report) -> str:
    stack = report.get("at", "").rstrip()
    return f" It is at:\n{stack}" if stack else ""


def _compare(i: int, report_i: Report, j: int, report_j: Report) -> str:
    """Returns how two processes differ, or "" if no difference is known yet."""
    for name in report_i["orders"].keys() & report_j["orders"].keys():
        order_i, order_j = report_i["orders"][name], report_j["orders"][name]
        difference = run_order.first_difference(order_i["runs"], order_j["runs"])
        if difference is not None:
            position, number_i, number_j = difference
            return (
                f"The processes differ at call {position + 1} of their shared calls. Process {i}: "
                f"{order_i['names'][str(number_i)]}; Process {j}: "
                f"{order_j['names'][str(number_j)]}. {_RULE}"
            )
        for (k, ended), (m, active) in (
            ((i, report_i), (j, report_j)),
            ((j, report_j), (i, report_i)),
        ):
            if ended["state"] != "ended":
                continue
            num_ended, num_active = (
                run_order.length(x["orders"][name]["runs"]) for x in (ended, active)
            )
            if num_ended < num_active:
                return (
                    f"Process {k} ended after {num_ended} shared call(s), but process {m} has "
                    f"started {num_active}. {_describe_last_calls(active)}{_RULE} Loops must have "
                    f"the same length, as loops over distributed datasets do."
                )
    return ""


def _describe_last_calls(report: Report) -> str:
    calls = [
        f"{order['names'][str(order['runs'][-1][0])]} (call {run_order.length(order['runs'])})"
        for order in report["orders"].values()
        if order["runs"]
    ]
    return f"Its last calls: {', '.join(calls)}. " if calls else ""
