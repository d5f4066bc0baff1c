"""What a run leaves behind while it runs: one JSON object per line, and TensorBoard events."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class MetricsWriter:
    """Writes `metrics.jsonl` and `tensorboard/` into a folder; each line is on disk at once.

    A line is `{"step": 10, "split": "train", "time_s": 12.3, "loss": 2.1, ...}`, where `time_s` is
    the time since the writer was made, on top of that of the lines it goes on from. TensorBoard
    shows the same numbers as `train/loss`. Without a folder nothing is written, which is what all
    processes but the first want.
    """

    def __init__(self, folder: Path | None, kept: Sequence[Mapping[str, Any]] | None = None):
        """Replaces the files of an earlier run; without tensorboardX there are no events.

        Args:
            folder: Where to write, if anywhere.
            kept: The lines of the same run to go on from, see `read_lines`: they become all that
                is in `metrics.jsonl`, and TensorBoard hides what it knows of later steps.
        """
        self._start = time.perf_counter()
        self._lines = None
        self._events = None
        if folder is None:
            return
        self._start -= max((float(line.get("time_s", 0)) for line in kept or ()), default=0.0)
        file = folder / "metrics.jsonl"
        # In one move: a process that is killed here leaves the old lines or the new ones.
        text = "".join(json.dumps(line) + "\n" for line in kept or ())
        with file.with_suffix(".new").open("w", encoding="utf-8") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        os.replace(file.with_suffix(".new"), file)
        self._lines = file.open("a", encoding="utf-8")
        if has_tensorboard():
            from tensorboardX import SummaryWriter

            purge_step = None
            if kept is None:  # TensorBoard would draw the curves of all runs in a folder as one
                for earlier in (folder / "tensorboard").glob("events.out.tfevents.*"):
                    earlier.unlink()
            else:
                purge_step = 1 + max((int(line["step"]) for line in kept), default=0)
            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Adds the `values` measured on `split` after `step` steps."""
        if self._lines is None:
            return
        line: dict[str, Any] = {"step": step, "split": split}
        line["time_s"] = round(time.perf_counter() - self._start, 3)
        self._lines.write(json.dumps(line | values) + "\n")
        self._lines.flush()
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(f"{split}/{name}", value, step)

    def text(self, name: str, text: str) -> None:
        """Adds a text to the TensorBoard events."""
        if self._events is not None:
            self._events.add_text(name, text)

    def sync(self) -> None:
        """Makes sure that what was written outlives the machine: a checkpoint builds on it."""
        if self._lines is not None:
            os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Writes what is left; nothing can be added afterwards."""
        if self._lines is not None:
            self._lines.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        """Closes at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes, whether or not there was an error."""
        self.close()


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` in a folder, without one that a killed process left unfinished.

    None where there is no such file.
    """
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            read = json.loads(line)
        except ValueError:
            continue
        if isinstance(read, dict):
            lines.append(read)
    return lines


def has_tensorboard() -> bool:
    """Whether TensorBoard events can be written here."""
    return importlib.util.find_spec("tensorboardX") is not None
