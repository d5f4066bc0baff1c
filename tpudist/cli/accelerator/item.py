"""One item of a section: a name, and a function that measures or checks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

Figures = Mapping[str, Any]
_NUM_AVERAGES = 3
OK, FAILED, LEFT_OUT = "ok", "failed", "left out"
"""Status of an item in the report; the latter two are followed by ": " and the reason."""


@dataclasses.dataclass(frozen=True)
class Item:
    """Something to check or to measure.

    Attributes:
        name: Name in the report, unique in its section.
        run: Measures, and returns figures that JSON can hold. `{"ok": False, ...}` is a failure.
    """

    name: str
    run: Callable[[], Figures]


def seconds_per_call(call: Callable[[], object], least_s: float = 0.05) -> float:
    """Returns the seconds of one call: the smallest of several averages, after a call to compile.

    `call` waits for its result. It is repeated until one average is over `least_s` seconds.
    """
    call()
    number, averages = 1, []
    while len(averages) < _NUM_AVERAGES:
        started = time.perf_counter()
        for _ in range(number):
            call()
        spent = time.perf_counter() - started
        if spent < least_s and number < 1_000_000:
            # Grows by at most 10 times, because the first measurement may be far off, and by at
            # least 1, so that the search ends. The bound of a million is for calls that take less
            # than the clock resolves.
            number = min(number * 10, max(number + 1, int(number * least_s / max(spent, 1e-9))))
            continue
        averages.append(spent / number)
    return min(averages)
