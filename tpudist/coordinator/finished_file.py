"""FinishedFile: the numbers of finished closures, on disk for a program that restarts."""

from __future__ import annotations

from pathlib import Path

from tpudist.ps.closure_ledger import ClosureLedger
from tpudist.ps.record_file import RecordFile, read_records


class FinishedFile:
    """Records which closures have finished, in a file if `path` is given.

    Args:
        path: File to create or to continue; None records nothing.

    Attributes:
        ledger: Numbers that will not run again: at first all below the first unfinished one.
            `ClosureQueue` adds to it.
        withdrawn: Numbers, not below `ledger.low`, of closures that were canceled and never ran.
    """

    def __init__(self, path: Path | None):
        self.ledger = ClosureLedger()
        self.withdrawn: set[int] = set()
        self._file = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Records: {"low": n} means that all numbers below n have finished; {"finished": n} that n
        # has, with "withdrawn" if it never ran.
        if path.exists():
            for facts, _ in read_records(path):
                if "low" in facts:
                    self.ledger.add_below(facts["low"])
                else:
                    self.ledger.add(facts["finished"])
                    if "withdrawn" in facts:
                        self.withdrawn.add(facts["finished"])
        # The restarted program schedules its functions again from number `low`. It repeats those
        # above `low` that had finished, because their results are lost; servers skip their updates
        # by their numbers. Canceled closures must stay canceled.
        self.ledger = ClosureLedger(self.ledger.low)
        self.withdrawn = {x for x in self.withdrawn if x >= self.ledger.low}
        # Write the compacted file under another name, and replace the old one atomically: a program
        # that is killed here leaves one of the two complete. Records are not synced until `close`:
        # after a crash of the host, functions run again whose records are lost.
        unfinished = path.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        compacted = RecordFile(unfinished)
        compacted.append({"low": self.ledger.low}, {})
        for number in sorted(self.withdrawn):
            compacted.append({"finished": number, "withdrawn": True}, {})
        compacted.close()
        unfinished.replace(path)
        self._file = RecordFile(path)

    def write(self, number: int, *, is_withdrawn: bool = False) -> None:
        """Records that a closure has finished, or was canceled before it ran."""
        if self._file is not None:
            record = {"finished": number}
            self._file.append(record | ({"withdrawn": True} if is_withdrawn else {}), {})

    def skip_to(self, low: int) -> None:
        """Records that no closure with a lower number will run again."""
        if low > self.ledger.low:
            self.ledger.add_below(low)
            if self._file is not None:
                self._file.append({"low": low}, {})

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
