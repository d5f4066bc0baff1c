"""Notices how the program of this process ends: normally, by an exception, or by SIGTERM."""

import traceback
from types import TracebackType
from typing import Literal

from tpudist.processes import preemption_service
from tpudist.processes.exit_codes import EXIT_PREEMPTED, EXIT_USER_ERROR
from tpudist.processes.host import this_host
from tpudist.processes.judge.process_reports import is_failed_collective
from tpudist.processes.process_exit import print_error

_MAX_WHY = 6000  # characters: a report is a value of the coordination service


class ProgramOutcome:
    """The end of a program, as its process reports it.

    Create it in the main thread. Other threads may read it.

    Args:
        index: Index of this process.

    Attributes:
        state: "ended" after the program has returned, "failed" after an exception or SIGTERM. It
            only leaves "running".
        why: Traceback or signal of a failed program.
        exit_code: Exit code of a process that has failed.
        has_verdict: Whether a verdict ends this process. Later exceptions follow from it, so they
            are not recorded.
    """

    def __init__(self, index: int):
        self.state: Literal["running", "ended", "failed"] = "running"
        self.why, self.exit_code = "", EXIT_USER_ERROR
        self.has_verdict = False
        self._index = index
        self._previous_hook = this_host().exception_hook()
        this_host().set_exception_hook(self._on_exception)
        preemption_service.SigtermHandler(self._on_sigterm)

    @property
    def has_failed_collective(self) -> bool:
        """Whether a collective failed. That is a symptom: another process may be the cause."""
        return self.state == "failed" and is_failed_collective(self.why)

    def close(self) -> None:
        """Restores the previous exception hook, unless the program has installed another one."""
        if this_host().exception_hook() == self._on_exception:
            this_host().set_exception_hook(self._previous_hook)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        self._previous_hook(kind, error, where)
        # The end of the text has the exception.
        text = "".join(traceback.format_exception(kind, error, where))
        self._fail(text[-_MAX_WHY:], EXIT_USER_ERROR)

    def _on_sigterm(self) -> None:
        # The others do not learn of the `SystemExit` that follows.
        if self._fail("SIGTERM: it received a request to end.", EXIT_PREEMPTED):
            print_error(
                f"[tpudist p{self._index}] SIGTERM. This program does not handle it, so "
                f"the process ends now. With PreemptionCheckpointHandler it would first save its "
                f"state."
            )

    def _fail(self, why: str, exit_code: int) -> bool:
        """Records a failure, unless the program has ended already; returns whether it did."""
        if self.state != "running" or self.has_verdict:
            return False
        # Before the state: the thread that reports may read in between, and "failed" without a
        # reason would become the verdict.
        self.why, self.exit_code = why, exit_code
        self.state = "failed"
        return True
