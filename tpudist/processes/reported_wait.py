"""A wait for other processes that has a limit, and that is reported while it lasts."""

import logging
import math
from collections.abc import Callable

from tpudist.processes.host import this_host

_log = logging.getLogger("tpudist")


class ReportedWait:
    """Measures one wait and reports it with growing pauses.

    Args:
        first_report_s: Seconds until the first report. Each later one comes after twice the time,
            so that a log does not fill.
        timeout_s: Seconds after which the wait is over.
        write: Called with each report; by default it is logged as a warning.
    """

    def __init__(
        self,
        first_report_s: float,
        timeout_s: float = math.inf,
        write: Callable[[str], None] = lambda text: _log.warning("%s", text),
    ):
        self.timeout_s = timeout_s
        self._write = write
        self._start = this_host().monotonic()
        self._next_report_s = first_report_s

    @property
    def waited_s(self) -> float:
        """Seconds since the start."""
        return this_host().monotonic() - self._start

    @property
    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return self.waited_s >= self.timeout_s

    def report(self, describe: Callable[[], str]) -> None:
        """Reports the wait if it is time.

        Args:
            describe: Called without arguments, only if a report is due; returns what waits for
                what.
        """
        waited_s = self.waited_s
        if waited_s >= self._next_report_s:
            self._next_report_s *= 2
            limit = f" of {self.timeout_s:g}" if self.timeout_s < math.inf else ""
            self._write(f"{describe()}: {waited_s:.0f} s{limit}.")
