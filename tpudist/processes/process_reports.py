"""Reports of processes to process 0, and the verdict of process 0 for each of them.

Both travel as JSON through the coordination service: reports under `tpudist/watch/report/<index>`,
verdicts under `tpudist/watch/verdict/<index>`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from tpudist.processes.run_order import Run

ALL_ENDED = "all ended"
"""Message of the verdict that every process has ended well."""


class OrderReport(TypedDict):
    """One order of shared calls, in one process.

    Attributes:
        runs: The latest runs; see `run_order`.
        names: Number of each shared call in `runs`, as a text -> its description.
    """

    runs: Sequence[Run]
    names: Mapping[str, str]


class Report(TypedDict):
    """State of one process, sent twice a second.

    Attributes:
        state: "ended" after the program has returned, "failed" after an exception.
        why: Traceback of a failed process.
        exit_code: Exit code for all processes if this one has failed.
        orders: Name of each order that the process follows -> its report.
        beat: Number of the report. A report that does not change is old.
        place: Host and pid; see `process_state`.
        stack: Stack of the program, if no shared call has begun for a while.
    """

    state: Literal["running", "ended", "failed"]
    why: str
    exit_code: int
    orders: Mapping[str, OrderReport]
    beat: int
    place: str
    stack: NotRequired[str]


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
