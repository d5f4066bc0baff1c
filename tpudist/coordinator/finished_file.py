"""FinishedFile: which closures have finished, for a program that is started again."""

from __future__ import annotations

from pathlib import Path

from tpudist.ps.closure_ledger import ClosureLedger
from tpudist.ps.record_file import RecordFile, read_records


class FinishedFile:
    """The numbers of closures that have finished, in a file if there is a folder for it.

    Attributes:
        ledger: The numbers that were in it when it was opened; who writes adds to it.
    """

    def __init__(self, path: Path | None):
        """Opens or makes it; None for no file."""
        self.ledger = ClosureLedger()
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
        # Those above the first that is missing run again, by their numbers: they have no effect.
        self.ledger = ClosureLedger(self.ledger.low)
        unfinished = path.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        beginning = RecordFile(unfinished)
        beginning.append({"low": self.ledger.low}, {})
        beginning.close()
        unfinished.replace(path)
        self._file = RecordFile(path)

    def write(self, number: int) -> None:
        """Notes that a closure has finished."""
        if self._file is not None:
            self._file.append({"finished": number}, {})

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            self._file.close()
