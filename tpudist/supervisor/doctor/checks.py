"""Checks of this machine: what is asked, what is found, and an end where no answer comes."""

import enum
import queue
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

QUICK_S = 10.0
"""How long a check may take that only looks."""

Asked = TypeVar("Asked", bound=Hashable)
Found = TypeVar("Found")


class Verdict(enum.Enum):
    """What an answer means for a run."""

    OK = "ok"
    WARNING = "warning"
    FAIL = "fail"


@dataclass(frozen=True)
class Answer:
    """One row.

    Attributes:
        asked: What was looked at.
        found: What there is.
        verdict: What that means.
        remedy: What to do about it; "" where nothing is to be done.
        details: Lines to read where that does not suffice, such as a stack.
    """

    asked: str
    found: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""
    details: str = ""


@dataclass(frozen=True)
class Check:
    """Something to look at.

    Attributes:
        asked: What, for the row of a check that crashes or does not end.
        answer: Looks; called in a thread of its own.
        timeout_s: How long it may take. One that takes longer is left alone, and is a failed row.
    """

    asked: str
    answer: Callable[[], Sequence[Answer]]
    timeout_s: float = QUICK_S


def run_checks(checks: Sequence[Check]) -> list[Answer]:
    """The answers of all, which look at the same time, in the order of the checks."""
    start = time.monotonic()
    running = [(check, _start(check.answer)) for check in checks]
    answers: list[Answer] = []
    for check, said in running:
        try:
            answers += _wait(said, start + check.timeout_s)
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


def ask_each(
    question: Callable[[Asked], Found], things: Iterable[Asked], timeout_s: float
) -> dict[Asked, Found | Exception]:
    """What a question that may hang says of each; its error, or TimeoutError where it says nothing.

    All are asked at once, each in a thread that nobody waits for: one in `getaddrinfo` cannot be
    ended, and must not hold up the end of the process.
    """
    deadline = time.monotonic() + timeout_s
    running = {x: _start(lambda x=x: question(x)) for x in dict.fromkeys(things)}
    found: dict[Asked, Found | Exception] = {}
    for x, said in running.items():
        try:
            found[x] = _wait(said, deadline)
        except queue.Empty:
            found[x] = TimeoutError(f"no answer within {timeout_s:g} s")
        except Exception as error:
            found[x] = error
    return found


_Said = queue.SimpleQueue[tuple[Found | None, Exception | None]]


def _start(question: Callable[[], Found]) -> _Said[Found]:
    said: _Said[Found] = queue.SimpleQueue()

    def ask() -> None:
        try:
            said.put((question(), None))
        except Exception as error:
            said.put((None, error))

    threading.Thread(target=ask, daemon=True).start()
    return said


def _wait(said: _Said[Found], deadline: float) -> Found:
    found, error = said.get(timeout=max(deadline - time.monotonic(), 0.001))
    if error is not None:
        raise error
    return found  # type: ignore[return-value]
