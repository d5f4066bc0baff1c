"""Runs checks of this machine in threads, each with a time limit, and collects the answers."""

import enum
import functools
import queue
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

QUICK_S = 10.0
"""Seconds for a check that starts no devices."""

Item = TypeVar("Item", bound=Hashable)
Result = TypeVar("Result")


class Verdict(enum.Enum):
    """Consequence of an answer for a run."""

    OK = "ok"
    WARNING = "warning"
    FAIL = "fail"


@dataclass(frozen=True)
class Answer:
    """One row of the report. `tpudist doctor --json` prints the fields with these names.

    Attributes:
        asked: Subject of the check.
        found: Result of the check.
        verdict: Consequence for a run.
        remedy: Recommended action, or "".
        details: Additional lines, such as a stack, or "".
    """

    asked: str
    found: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""
    details: str = ""


@dataclass(frozen=True)
class Check:
    """A check to run.

    Attributes:
        asked: Subject, for the row of a check that crashes or hangs.
        answer: Called in a thread of its own; returns rows.
        timeout_s: Seconds for the check. After that it becomes a failed row, and its thread is
            abandoned.
    """

    asked: str
    answer: Callable[[], Sequence[Answer]]
    timeout_s: float = QUICK_S


def run_checks(checks: Sequence[Check]) -> list[Answer]:
    """Runs all checks at the same time; returns their answers in the order of the checks."""
    start = time.monotonic()
    running = [(check, _start(check.answer)) for check in checks]
    answers: list[Answer] = []
    for check, outcome in running:
        try:
            answers += _wait(outcome, start + check.timeout_s)
        except queue.Empty:
            found = f"no answer within {check.timeout_s:g} s"
            remedy = "A file system, a device or a name server does not answer."
            answers.append(Answer(check.asked, found, Verdict.FAIL, remedy))
        except Exception as error:
            found = f"the check failed: {type(error).__name__}: {error}"
            remedy = "This is a bug in tpudist. The other rows are still valid."
            text = "".join(traceback.format_exception(error))
            answers.append(Answer(check.asked, found, Verdict.FAIL, remedy, text))
    return answers


def call_each(
    function: Callable[[Item], Result], items: Iterable[Item], timeout_s: float
) -> dict[Item, Result | Exception]:
    """Calls a function that may hang with each item, all at once; returns results and errors.

    The result of a call that hangs is a `TimeoutError`.
    """
    # Not a thread pool, which Python joins at its end: a thread in `getaddrinfo` cannot be ended.
    deadline = time.monotonic() + timeout_s
    running = {x: _start(lambda x=x: function(x)) for x in dict.fromkeys(items)}
    results: dict[Item, Result | Exception] = {}
    for x, outcome in running.items():
        try:
            results[x] = _wait(outcome, deadline)
        except queue.Empty:
            results[x] = TimeoutError(f"no answer within {timeout_s:g} s")
        except Exception as error:
            results[x] = error
    return results


# A queue with one element: a function that returns the result or raises the error of the call. Not
# a `Future`, whose own `TimeoutError` would look like one of the call.
_Outcome = queue.SimpleQueue[Callable[[], Result]]


def _start(function: Callable[[], Result]) -> _Outcome[Result]:
    """Calls a function in a daemon thread."""
    outcome: _Outcome[Result] = queue.SimpleQueue()

    def run() -> None:
        try:
            result = function()
        except Exception as error:
            outcome.put(functools.partial(_raise, error))
        else:
            outcome.put(lambda: result)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def _wait(outcome: _Outcome[Result], deadline: float) -> Result:
    """Returns the result of a call, or raises its error; `queue.Empty` at the deadline."""
    return outcome.get(timeout=max(deadline - time.monotonic(), 0.001))()


def _raise(error: Exception) -> NoReturn:
    raise error
