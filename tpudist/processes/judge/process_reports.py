"""Reports of processes to process 0, and the verdict of process 0 for all of them.

Both travel as text through the coordination service. In each round process 0 reads the report of
every process, so a report has two lines: the first contains the few facts that process 0 compares,
and the second the details that only messages need, which are parsed when a message is written.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from tpudist.processes.run_order import STARTING, Run, length

ALL_ENDED = "all ended"
"""Message of the verdict that every process has ended well."""

_read_first_line = json.JSONDecoder().raw_decode  # ignores what follows the JSON value

State = Literal["running", "ended", "failed"]

# The exception of a collective whose peer is gone.
_COLLECTIVE_ERROR = "JaxRuntimeError"


def is_failed_collective(why: str) -> bool:
    """Whether a program failed in a collective: a symptom, whose cause may be another process."""
    return _COLLECTIVE_ERROR in why


class OrderReport(NamedTuple):
    """The latest calls of one order of shared calls, in one process.

    Runs follow each other without a gap, so a run ends where the next one starts. Two processes
    with the same calls write the same text for each run that has ended, so orders are compared
    without being parsed.

    Attributes:
        start: Position of the first call in `text`.
        end: Position after the last call in `text`.
        length: Number of calls that have begun: one more than `end` if a call is being dispatched,
            whose number is not known yet.
        text: `;<start>,<number>` for each run, oldest first.
    """

    start: int
    end: int
    length: int
    text: str

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "OrderReport":
        """Returns the report of the runs that `RunOrder.last_runs` has returned."""
        known = [run for run in runs if run[0] != STARTING]
        start, end = (known[0][1], length(known)) if known else (0, 0)
        text = "".join(f";{start},{number}" for number, start, _ in known)
        return cls(start, end, length(runs), text)

    @property
    def runs(self) -> list[Run]:
        """The runs that `of` was given."""
        heads = [head.partition(",") for head in self.text.split(";")[1:]]
        bounds = itertools.pairwise([*(int(start) for start, _, _ in heads), self.end])
        runs = [
            (int(number), start, end - start)
            for (_, _, number), (start, end) in zip(heads, bounds, strict=True)
        ]
        return [*runs, (STARTING, self.end, 1)] if self.length > self.end else runs


class Details(TypedDict):
    """The part of a report that only messages need.

    Attributes:
        why: Traceback of a failed process.
        exit_code: Exit code for all processes if this one has failed.
        names: Name of each order -> number of each shared call in its runs, as a text -> its
            description.
        place: Host and pid; see `process_state`.
        stack: Stack of the program, if no shared call has begun for a while.
    """

    why: str
    exit_code: int
    names: Mapping[str, Mapping[str, str]]
    place: str
    stack: NotRequired[str]


class Report(NamedTuple):
    """State of one process, sent once per interval.

    Attributes:
        process: Index of the process.
        beat: Number of the report. A report that does not change is old.
        state: "ended" after the program has returned, "failed" after an exception.
        orders: Name of each order that the process follows -> its calls.
        details_text: `Details` as JSON.
    """

    process: int
    beat: int
    state: State
    orders: Mapping[str, OrderReport]
    details_text: str

    @property
    def details(self) -> Details:
        """The facts for messages; each access parses them."""
        return json.loads(self.details_text)

    def encode(self) -> str:
        """Returns the report as a text."""
        return f"{json.dumps(self[:-1])}\n{self.details_text}"

    @classmethod
    def decode(cls, text: str) -> "Report":
        """Returns the report that `encode` has written."""
        (process, beat, state, fields), end = _read_first_line(text)
        orders = {name: OrderReport._make(x) for name, x in fields.items()}
        return cls._make((process, beat, state, orders, text[end + 1 :]))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The reason why all processes must end, or the news that all have ended well.

    Attributes:
        message: Reason, as each process prints it; `ALL_ENDED` if all have ended.
        exit_code: Exit code of all processes.
        failed: Index of the process that failed; None if processes differ, or all have ended.
        all_threads: Whether to print the stacks of all threads.
        process_0_is_silent: Whether process 0 does not answer, so that nobody waits for it.
    """

    message: str
    exit_code: int
    failed: int | None = None
    all_threads: bool = False
    process_0_is_silent: bool = False

    def encode(self) -> str:
        """Returns the verdict as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> "Verdict":
        """Returns the verdict that `encode` has written."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)
