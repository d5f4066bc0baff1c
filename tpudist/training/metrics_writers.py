"""Writers of the metrics of a run: lines of JSON, TensorBoard events, Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from tpudist.training.history import History


class MetricsWriter(Protocol):
    """Receives the metrics of a run; only the first process calls its writers."""

    def begin(self, history: History) -> None:
        """Opens the writer of a run that has finished `history.num_steps` steps.

        Metrics of later steps belong to a start that ended before its next checkpoint. These steps
        run again, so the writer discards their metrics.
        """
        ...

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes metrics.

        Args:
            step: Number of finished steps.
            split: `train`, `held_out`, or `resumed` when a run resumes.
            values: Values by name.
        """
        ...

    def sync(self) -> None:
        """Waits until all metrics are on disk: a checkpoint of their steps follows."""
        ...

    def close(self) -> None:
        """Writes buffered metrics; there are no more calls afterwards."""
        ...


class JsonLinesWriter:
    """Writes `metrics.jsonl` into a folder; each line is on disk at once.

    A line is `{"step": 10, "split": "train", "time_s": 12.3, "loss": 2.1, ...}`, where `time_s` is
    the time since the run began, without pauses between its starts. A run that resumes keeps the
    lines of its finished steps, and its `History` restores losses and times from them.

    Args:
        folder: Directory of the run; created if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._path = Path(folder) / "metrics.jsonl"
        self._start = time.perf_counter()
        self._lines: IO[str] | None = None  # open between `begin` and `close`

    def begin(self, history: History) -> None:
        """Keeps only the lines of finished steps; see `MetricsWriter`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = history.continue_from(read_lines(self._path.parent)) if history.num_steps else []
        # The clock of the file continues where the last kept line was written.
        earlier_s = max((float(line.get("time_s", 0)) for line in kept), default=0.0)
        self._start = time.perf_counter() - earlier_s
        # A process that is killed here leaves either the old lines or the new ones.
        new_path = self._path.with_suffix(".new")
        with new_path.open("w", encoding="utf-8") as new:
            new.write("".join(json.dumps(line) + "\n" for line in kept))
            new.flush()
            os.fsync(new.fileno())
        os.replace(new_path, self._path)
        self._lines = self._path.open("a", encoding="utf-8")

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Appends a line."""
        assert self._lines is not None, "begin() was not called"
        line: dict[str, Any] = {"step": step, "split": split}
        line["time_s"] = round(time.perf_counter() - self._start, 3)
        # A loss that is not finite is written as NaN or Infinity, which `read_lines` accepts.
        self._lines.write(json.dumps(line | dict(values)) + "\n")
        # Buffered text is flushed to the system per line, so a killed process loses no line; only a
        # crash of the machine may, and `sync` guards against that before each checkpoint.
        self._lines.flush()

    def sync(self) -> None:
        """Waits until the lines are on disk."""
        assert self._lines is not None, "begin() was not called"
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Closes the file."""
        if self._lines is not None:
            self._lines.close()


class TensorBoardWriter:
    """Writes events such as `train/loss` into `tensorboard/` of a folder.

    A run that resumes hides the events of later steps. A new run deletes the events of an earlier
    run in the same folder, because TensorBoard would join the curves of both.

    Args:
        folder: Directory of the run.

    Raises:
        ModuleNotFoundError: If tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        if not has_tensorboard():
            raise ModuleNotFoundError(
                "TensorBoardWriter requires tensorboardX, which is not installed: pip install "
                "tensorboardX."
            )
        self._folder = Path(folder) / "tensorboard"
        self._events: Any = None  # a `SummaryWriter`; tensorboardX is optional and untyped

    def begin(self, history: History) -> None:
        """Creates a file of events; see `MetricsWriter`."""
        from tensorboardX import SummaryWriter

        # TensorBoard hides all events from this step on that are in earlier files of the folder.
        purge_step = history.num_steps + 1 if history.num_steps else None
        if purge_step is None:
            for earlier in self._folder.glob("events.out.tfevents.*"):
                earlier.unlink()
        self._events = SummaryWriter(str(self._folder), purge_step=purge_step)

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes a scalar for each value."""
        for name, value in values.items():
            self._events.add_scalar(f"{split}/{name}", value, step)

    def write_text(self, name: str, text: str) -> None:
        """Writes a text."""
        self._events.add_text(name, text)

    def sync(self) -> None:
        """Does nothing: a resumed run does not read events."""

    def close(self) -> None:
        """Writes buffered events."""
        if self._events is not None:
            self._events.close()


@runtime_checkable
class WandbRun(Protocol):
    """Method of `wandb.Run` that `WandbWriter` calls."""

    def log(self, data: dict[str, float], step: int) -> None:
        """Logs values of a step."""
        ...


class WandbWriter:
    """Logs metrics such as `train/loss` to a run of Weights & Biases.

        writer = tpudist.training.WandbWriter(wandb.init(project="digits", resume="allow", id=name))

    W&B rejects steps before its last step. So if a run resumes from a checkpoint, the
    metrics of steps that run again keep their first values.

    Args:
        run: Result of `wandb.init`. The writer does not finish it.

    Raises:
        TypeError: If `run` is not a run of W&B.
    """

    def __init__(self, run: WandbRun):
        if not isinstance(run, WandbRun):
            raise TypeError(
                f"WandbWriter(run={type(run).__name__}): this object has no log(). Pass the run "
                f"that wandb.init(...) returns."
            )
        self._run = run

    def begin(self, history: History) -> None:
        """Does nothing: W&B knows its last step."""

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Logs the values."""
        self._run.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def sync(self) -> None:
        """Does nothing: W&B sends in the background."""

    def close(self) -> None:
        """Does nothing: the caller finishes the run."""


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of `metrics.jsonl` in a folder; no lines if there is no such file.

    A line that a killed process left incomplete is omitted.
    """
    try:
        # "replace", because a machine that lost power may leave any bytes at the end of the file.
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            lines.append(values)
    return lines


def has_tensorboard() -> bool:
    """Returns whether tensorboardX is installed."""
    return importlib.util.find_spec("tensorboardX") is not None
