"""Compares the reports of all processes, and decides whether and why the run cannot continue.

Runs in process 0 (`process_watch`). It does no communication: `Judge.judge` maps reports and the
clock to a verdict, so tests can move the clock.
"""

import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence

from tpudist.processes import process_state
from tpudist.processes.exit_codes import EXIT_PEER_LOST, EXIT_USER_ERROR
from tpudist.processes.host import this_host
from tpudist.processes.judge.process_difference import describe_last_calls, find_difference
from tpudist.processes.judge.process_reports import (
    ALL_ENDED,
    Report,
    Verdict,
    is_failed_collective,
)
from tpudist.processes.judge.process_silence import SILENT_S, WARN_S, describe_silence
from tpudist.processes.peer_connections import DEAD_PEER_S

_log = logging.getLogger("tpudist")

INTERVAL_S = 0.5
"""Seconds between two reports of a process in a small run; see `report_interval_s`."""
_REPORTS_PER_S = 1000  # that process 0 can read
HANG_VARIABLE = "TPUDIST_HANG_TIMEOUT_S"
HANG_S = 600.0
"""Seconds that others may wait for one process until all end; `HANG_VARIABLE` overrides it."""
SELF_STOPPED_S = SILENT_S / 4
"""Seconds between two looks at the others after which this process itself was stopped or busy.

Its knowledge of the others is old then.
"""
HOLD_S = 2.0
"""Seconds for which a failed collective is not reported: another process may be the cause."""
# Each warning doubles the time until the next one. After this many seconds without a warning the
# time starts at `WARN_S` again, so that a process that is always slow is reported now and then.
_BETWEEN_WARNINGS_S = 120.0
_FIRST_REPORT_S = 10.0  # within which each process that creates a strategy has reported
START_AGAIN = "Restart all processes from the last checkpoint."

Reports = Mapping[int, Report]


def report_interval_s(count: int) -> float:
    """Returns the seconds between two reports of each of `count` processes."""
    return INTERVAL_S + count / _REPORTS_PER_S


class Judge:
    """Compares the reports of `count` processes.

    A process that has not reported yet is missing in the reports, and is not waited for here:
    the rendezvous has done that.
    """

    def __init__(self, count: int):
        self._count, self._interval_s = count, report_interval_s(count)
        # Last beat of each process, when it was first seen, and how long after the one before. The
        # clocks of hosts may differ, so beats are only compared for equality.
        self._beats: dict[int, tuple[int, float, float]] = {}
        # For each process, its numbers of shared calls, and since when another process is ahead of
        # it while it has these.
        self._behind_since: dict[int, tuple[list[int], float]] = {}
        self._judged_s = this_host().monotonic()
        self._ended_since_s = self._failed_since_s = math.inf
        # Seconds of waiting from which on to warn, and the time of the last warning.
        self._warn_after_s, self._warned_s = WARN_S, -math.inf
        self._hang_s = hang_timeout()

    def judge(self, reports: Reports) -> Verdict | None:
        """Returns the verdict for all processes, or None if they continue."""
        # In order of certainty. An exception is a cause; a difference is certain, too, and explains
        # a silence that may follow. Silence and lag are symptoms, which have time limits.
        silences = self._find_silences(reports)
        failed = next((i for i, report in reports.items() if report.state == "failed"), None)
        if failed is not None:
            verdict = self._explain_failure(failed, reports, silences)
            if verdict is not None:
                return verdict
        if difference := find_difference([reports[i] for i in sorted(reports)]):
            return Verdict(difference, EXIT_USER_ERROR)
        if self._have_ended(reports):
            return Verdict(ALL_ENDED, 0)
        return self._judge_silences(silences, reports) or self._judge_lag(silences, reports)

    def _judge_silences(
        self, silences: Sequence[tuple[int, float]], reports: Reports
    ) -> Verdict | None:
        # Not only the longest silence: that process may be in a debugger, and have no limit.
        for index, waited_s in silences:
            if waited_s <= WARN_S:
                break
            silence = describe_silence(index, waited_s, reports[index].details["place"])
            if waited_s > silence.limit_s:
                last = describe_last_calls(reports[index])
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
        now = this_host().monotonic()
        if now - self._warned_s > _BETWEEN_WARNINGS_S:
            self._warn_after_s = WARN_S
        if waited_s > self._warn_after_s:
            self._warn_after_s, self._warned_s = 2 * waited_s, now
            _log.warning("%s", text)

    def _explain_failure(
        self, index: int, reports: Reports, silences: Sequence[tuple[int, float]]
    ) -> Verdict | None:
        """Returns the verdict for a failed process; None while another may still be the cause."""
        details = reports[index].details
        why = details["why"]
        if is_failed_collective(why):
            # The cause gets `HOLD_S` to become known: a process that raised reports within an
            # interval, a stopped one is silent.
            self._failed_since_s = min(self._failed_since_s, this_host().monotonic())
            # Long enough for a process that went silent just before to be silent for `HOLD_S`, and
            # for the others to be heard again if process 0 could not reach any of them.
            if this_host().monotonic() - self._failed_since_s < HOLD_S + 2 * self._interval_s:
                return None
            if silences:
                silent, waited_s = silences[0]
                silence = describe_silence(silent, waited_s, reports[silent].details["place"])
                return _peer_lost(silent, f"{silence.text} {START_AGAIN}")
        message = f"Process {index} failed, so this process cannot continue:\n{why}"
        return Verdict(message, details["exit_code"], failed=index)

    def _have_ended(self, reports: Reports) -> bool:
        if not all(x.state == "ended" for x in reports.values()):
            self._ended_since_s = math.inf
            return False
        self._ended_since_s = min(self._ended_since_s, this_host().monotonic())
        # A process that has not reported for so long creates no strategy, so it takes part in
        # nothing that the others do.
        is_long_ago = this_host().monotonic() - self._ended_since_s > _FIRST_REPORT_S
        return len(reports) == self._count or is_long_ago

    def _find_silences(self, reports: Reports) -> list[tuple[int, float]]:
        """Returns each running process that is silent, and for how many seconds, longest first.

        A silence of less than `HOLD_S` has no consequence yet.
        """
        now = this_host().monotonic()
        # The limits are for a small run. In a large one, reports are due later, and judged less
        # often.
        due_s = self._interval_s - INTERVAL_S
        if now - self._judged_s > SELF_STOPPED_S + due_s:
            self._beats.clear()
        self._judged_s = now
        beats, since_s, silences = self._beats, now - due_s - HOLD_S, list[tuple[int, float]]()
        for index, report in reports.items():
            known = beats.get(index)
            if known is None or known[0] != report.beat:
                gap_s = 0.0 if known is None else min(now - known[1], DEAD_PEER_S)
                beats[index] = report.beat, now, gap_s
            elif known[1] <= since_s and report.state == "running":
                # On a slow link, reports are as far apart as a round trip is long.
                silence_s = now - known[1] - max(due_s, known[2] - INTERVAL_S)
                if silence_s >= HOLD_S:
                    silences.append((index, silence_s))
        return sorted(silences, key=lambda x: -x[1])

    def _find_laggard(self, reports: Reports, silent: Collection[int]) -> tuple[int, float] | None:
        """Returns the process that others have waited for longest, and for how many seconds.

        Silent processes are left out: they have their own limits.
        """
        now = this_host().monotonic()
        longest: dict[str, int] = {}
        for report in reports.values():
            for name, order in report.orders.items():
                if order.length > longest.get(name, -1):
                    longest[name] = order.length
        # A process lags if another has begun more calls of an order that both follow. Its time
        # starts again with each call that it begins: a slow process is not a hung one.
        laggard, waited_s = None, -math.inf
        for i, report in reports.items():
            lengths = [order.length for order in report.orders.values()]
            known = self._behind_since.get(i)
            if (
                known is None
                or known[0] != lengths
                or lengths == [longest[x] for x in report.orders]
            ):
                known = self._behind_since[i] = lengths, now
            if report.state == "running" and now - known[1] > waited_s and i not in silent:
                laggard, waited_s = i, now - known[1]
        return None if laggard is None else (laggard, waited_s)


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
    laggard = f"process {index} ({process_state.describe(report.details['place'])})"
    for name, order in report.orders.items():
        for other in reports.values():
            other_order = other.orders.get(name)
            if other_order and other_order.length > order.length:
                call = _name_of_call(other, name, order.length)
                return (
                    f"Process {other.process} has waited {seconds:.0f} s for {laggard} to start "
                    f"{call} (call {order.length + 1})."
                )
    return f"Other processes have waited {seconds:.0f} s for process {index}."


def _name_of_call(report: Report, name: str, position: int) -> str:
    """Returns the description of the call at a position, or of the oldest call still known."""
    runs = report.orders[name].runs
    number = next((n for n, start, times in runs if position < start + times), None)
    return report.details["names"][name].get(str(number), "a shared call")


def _describe_stack(report: Report) -> str:
    stack = report.details.get("stack", "").rstrip()
    return f" It is at:\n{stack}" if stack else ""
