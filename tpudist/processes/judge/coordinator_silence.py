"""Decides what a process does while process 0, which would give the verdict, does not answer."""

import logging
from collections.abc import Callable

from tpudist.processes.exit_codes import EXIT_PEER_LOST
from tpudist.processes.judge.process_judge import HOLD_S, START_AGAIN
from tpudist.processes.judge.process_reports import Verdict
from tpudist.processes.judge.process_silence import SILENT_S, WARN_S, describe_silence

_log = logging.getLogger("tpudist")


class CoordinatorSilence:
    """The silence of process 0, which it cannot report itself.

    Args:
        measure: Returns the seconds since process 0 was heard; 0 without a connection to it.

    Attributes:
        place: Host and pid of process 0, once they are known; see `process_state`.
    """

    def __init__(self, measure: Callable[[], float]):
        self._measure = measure
        self._warn_after_s = WARN_S
        self.place = ""

    def judge(self) -> Verdict | None:
        """Returns a verdict if process 0 is silent for too long; warns before."""
        waited_s = self._measure()
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
