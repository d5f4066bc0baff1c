"""Decides what a process does while process 0, which would give the verdict, does not answer."""

import logging
from collections.abc import Callable

from tpudist.processes.exit_codes import EXIT_PEER_LOST
from tpudist.processes.host import this_host
from tpudist.processes.judge.process_judge import HOLD_S, SELF_STOPPED_S, START_AGAIN
from tpudist.processes.judge.process_reports import Verdict
from tpudist.processes.judge.process_silence import SILENT_S, WARN_S, describe_silence

_log = logging.getLogger("tpudist")


class CoordinatorSilence:
    """The silence of process 0, which it cannot report itself.

    Args:
        measure: Returns the seconds since process 0 was heard; 0 if that is unknown.
        call_s: Most seconds between two calls of `judge`.

    Attributes:
        place: Host and pid of process 0, once they are known; see `process_state`.
    """

    def __init__(self, measure: Callable[[], float], call_s: float):
        self._measure, self._call_s = measure, call_s
        self._judged_s = self._since_s = this_host().monotonic()
        self._warn_after_s = WARN_S
        self.place = ""

    def judge(self) -> Verdict | None:
        """Returns a verdict if process 0 is silent for too long; warns before."""
        now = this_host().monotonic()
        if now - self._judged_s > self._call_s + SELF_STOPPED_S:
            self._since_s = now  # this process was stopped or busy, perhaps with all others
        self._judged_s = now
        waited_s = min(self._measure(), now - self._since_s)
        if waited_s <= WARN_S:
            self._warn_after_s = WARN_S
            return None
        silence = describe_silence(0, waited_s, self.place)
        if waited_s > silence.limit_s:
            return Verdict(
                f"{silence.text} {START_AGAIN}", EXIT_PEER_LOST, failed=0, process_0_is_silent=True
            )
        if waited_s > self._warn_after_s:
            self._warn_after_s = 2 * waited_s
            _log.warning("%s", silence.warning)
        return None

    def may_have_a_cause(self) -> bool:
        """Whether process 0 is silent, and may soon be found to be lost.

        A collective that fails meanwhile may be a symptom of that. Either process 0 answers again,
        or its connection ends within `DEAD_PEER_S`, or its silence becomes a verdict. A debugger
        has no limit, so this wait has one, a little longer than that of any verdict.
        """
        return HOLD_S < self._measure() < SILENT_S + HOLD_S


class ReportAge:
    """Age of the report of process 0, as far as it shows that process 0 is silent.

    Args:
        due_s: Age of a report that shows nothing yet.
    """

    def __init__(self, due_s: float):
        self._due_s, self._text = due_s, ""
        self._changed_s: float | None = None

    def read(self, text: str) -> None:
        """Notices whether the report has changed. The clocks of hosts may differ."""
        if text != self._text:
            self._text, self._changed_s = text, this_host().monotonic()

    def seconds(self) -> float:
        """Returns the seconds of silence; 0 before the first report."""
        if self._changed_s is None:
            return 0.0
        return max(0.0, this_host().monotonic() - self._changed_s - self._due_s)
