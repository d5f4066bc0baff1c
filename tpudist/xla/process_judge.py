"""Compares what the processes of a run tell of themselves, and says why they cannot go on.

A report has the `state` of a process (running, ended, failed), `why` it has failed, a `beat` that
is another one in each report, and for each order that it follows the last `runs` (`run_order`) and
the `names` of their numbers.
"""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from tpudist.xla import run_order

_log = logging.getLogger("tpudist")

INTERVAL_S = 0.5
"""Between the reports of a process."""
WARN_S = 30.0
"""After which it is said that a process tells nothing."""
SILENT_S = 90.0
"""After which such a process is taken for dead or stopped: a bit less than JAX's own 100 s.

Not much less, since a long computation in C that does not let other threads run is silent, too.
"""
EXIT_USER_ERROR = 1
EXIT_PEER_LOST = 75
"""Exit code where another process or the network has failed: start again from a checkpoint."""
ALL_ENDED = "all ended"
"""The message of the verdict that all have ended well."""
HOLD_S = 2.0
"""Before a failed collective is told of: another process may be the cause, and silent."""
_COLLECTIVE_ERROR = "JaxRuntimeError"
_FIRST_REPORT_S = 10.0  # within which each process that makes a strategy has told something
_RULE = (
    "They would wait for each other for ever, or compute with each other's numbers. All processes "
    "of a run must do the same things in the same order."
)


class Judge:
    """Compares what processes tell."""

    def __init__(self, count: int):
        """Of `count` processes, none of which has told anything yet."""
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
            return {"message": ALL_ENDED, "exit_code": 0}
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
            if silent and silent[1] >= HOLD_S:
                return _describe_silence(*silent, reports)
            if time.monotonic() - self._failed_since < HOLD_S + 2 * INTERVAL_S:
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


def _last_of(report: Mapping[str, Any]) -> str:
    told = [
        f"{order['names'][str(order['runs'][-1][0])]} (call {run_order.length(order['runs'])})"
        for order in report["orders"].values()
        if order["runs"]
    ]
    return f"Its last: {', '.join(told)}. " if told else ""
