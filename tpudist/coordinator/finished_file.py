"""FinishedFile: which closures have finished, for a program that is started again."""

from __future__ import annotations

from pathlib import Path

from tpudist.ps.closure_ledger import ClosureLedger
from tpudist.ps.record_file import RecordFile, read_records


class FinishedFile:
    """The numbers of closures that have finished, in a file if there is a folder for it.

    Attributes:
        ledger: The numbers that were in it when it was opened; who writes adds to it.
        withdrawn: Those above the first that is missing that were cancelled, and never run.
    """

    def __init__(self, path: Path | None):
        """Opens or makes it; None for no file."""
        self.ledger = ClosureLedger()
        self.withdrawn: set[int] = set()
        self._file = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists():
            for facts, _ in read_records(path):
                if "low" in facts:
                    self.ledger.raise_to(facts["low"])
                else:
                    self.ledger.add(facts["finished"])
                    if "withdrawn" in facts:
                        self.withdrawn.add(facts["finished"])
        # Those above the first that is missing run again, by their numbers: they have no effect.
        # But for those that have never run.
        self.ledger = ClosureLedger(self.ledger.low)
        self.withdrawn = {x for x in self.withdrawn if x >= self.ledger.low}
        unfinished = path.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        beginning = RecordFile(unfinished)
        beginning.append({"low": self.ledger.low}, {})
        for number in sorted(self.withdrawn):
            beginning.append({"finished": number, "withdrawn": True}, {})
        beginning.close()
        unfinished.replace(path)
        self._file = RecordFile(path)

    def write(self, number: int, *, is_withdrawn: bool = False) -> None:
        """Notes that a closure has finished, or will never run."""
        if self._file is not None:
            more = {"withdrawn": True} if is_withdrawn else {}
            self._file.append({"finished": number, **more}, {})

    def skip_to(self, low: int) -> None:
        """Notes that no closure of a lower number will run any more."""
        if low > self.ledger.low:
            self.ledger.raise_to(low)
            if self._file is not None:
                self._file.append({"low": low}, {})

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            self._file.close()
