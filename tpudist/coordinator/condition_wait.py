"""Waits for a condition, and logs what a program waits for if that takes long."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tpudist.engine.concurrency import Concurrency, Condition

REPORT_S = 10.0
"""Seconds until the first report. Each later report comes after twice the time."""
_log = logging.getLogger("tpudist")


def wait_and_report(
    condition: Condition,
    concurrency: Concurrency,
    predicate: Callable[[], bool],
    describe: Callable[[float], str],
    timeout_s: float | None = None,
) -> bool:
    """Waits like `condition.wait_for`, and logs a report from time to time.

    Args:
        condition: Condition that the caller holds.
        concurrency: Provides the clock.
        predicate: Called under `condition`; returns whether the wait is over.
        describe: Called with the seconds waited so far; returns the text of a report.
        timeout_s: Maximum seconds to wait; None for no limit.

    Returns:
        Whether the predicate holds; False after the timeout.
    """
    start_s, report_s = concurrency.now_s(), REPORT_S
    while True:
        waited_s = concurrency.now_s() - start_s
        left_s = report_s - waited_s
        if timeout_s is not None:
            left_s = min(left_s, timeout_s - waited_s)
        if condition.wait_for(predicate, max(left_s, 0.0)):
            return True
        waited_s = concurrency.now_s() - start_s
        if timeout_s is not None and waited_s >= timeout_s:
            return False
        if waited_s >= report_s:
            report_s = 2 * waited_s
            _log.warning(describe(waited_s))
