"""Where a run's numbers go while it runs: lines of JSON, TensorBoard events, Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tpudist.training.history import History


class MetricsWriter(Protocol):
    """Takes the numbers of a run; only the first process has any."""

    def begin(self, history: History) -> None:
        """Called before the first step, of a run that has done `history.num_steps` steps.

        What is known of later steps belongs to a start that was cut short: they are done again.
        """
        ...

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Takes the `values` measured after `step` steps.

        Args:
            step: Steps done.
            split: `train`, `held_out`, or `resumed` where a run goes on.
            values: By name.
        """
        ...

    def sync(self) -> None:
        """Makes sure that what was written outlives the machine: a checkpoint builds on it."""
        ...

    def close(self) -> None:
        """Writes what is left; nothing is added afterwards."""
        ...


class JsonLinesWriter:
    """Writes `metrics.jsonl` into a folder; each line is on disk at once.

    A line is `{"step": 10, "split": "train", "time_s": 12.3, "loss": 2.1, ...}`, where `time_s` is
    the time since the run began, but for pauses between its starts. A run that goes on keeps the
    lines of the steps that it has done, and tells its `History` of them.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """Of the folder of a run; it is made if need be."""
        self._path = Path(folder) / "metrics.jsonl"
        self._start = time.perf_counter()
        self._lines: Any = None

    def begin(self, history: History) -> None:
        """Keeps the lines of the steps done, and no others; see `MetricsWriter`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = history.continue_from(read_lines(self._path.parent)) if history.num_steps else []
        earlier_s = max((float(line.get("time_s", 0)) for line in kept), default=0.0)
        self._start = time.perf_counter() - earlier_s
        # In one move: a process that is killed here leaves the old lines or the new ones.
        new_path = self._path.with_suffix(".new")
        with new_path.open("w", encoding="utf-8") as new:
            new.write("".join(json.dumps(line) + "\n" for line in kept))
            new.flush()
            os.fsync(new.fileno())
        os.replace(new_path, self._path)
        self._lines = self._path.open("a", encoding="utf-8")

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Adds a line."""
        line: dict[str, Any] = {"step": step, "split": split}
        line["time_s"] = round(time.perf_counter() - self._start, 3)
        self._lines.write(json.dumps(line | dict(values)) + "\n")
        self._lines.flush()

    def sync(self) -> None:
        """Has the disk keep the lines."""
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Closes the file."""
        if self._lines is not None:
            self._lines.close()


class TensorBoardWriter:
    """Writes events into `tensorboard/` of a folder: `train/loss` and its like.

    Needs tensorboardX. A run that goes on hides what TensorBoard knows of later steps; one that
    starts replaces the events of an earlier one, whose curves would be drawn as one with its own.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """Of the folder of a run.

        Raises:
            ModuleNotFoundError: tensorboardX is not installed.
        """
        if not has_tensorboard():
            raise ModuleNotFoundError(
                "TensorBoardWriter requires tensorboardX, which is not installed: pip install "
                "tensorboardX."
            )
        self._folder = Path(folder) / "tensorboard"
        self._events: Any = None

    def begin(self, history: History) -> None:
        """Makes a file of events; see `MetricsWriter`."""
        from tensorboardX import SummaryWriter

        purge_step = history.num_steps + 1 if history.num_steps else None
        if purge_step is None:
            for earlier in self._folder.glob("events.out.tfevents.*"):
                earlier.unlink()
        self._events = SummaryWriter(str(self._folder), purge_step=purge_step)

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Adds a scalar for each value."""
        for name, value in values.items():
            self._events.add_scalar(f"{split}/{name}", value, step)

    def write_text(self, name: str, text: str) -> None:
        """Adds a text."""
        self._events.add_text(name, text)

    def sync(self) -> None:
        """Nothing: events are for looking at, and no checkpoint builds on them."""

    def close(self) -> None:
        """Writes what is left."""
        if self._events is not None:
            self._events.close()


class WandbWriter:
    """Logs to a run of Weights & Biases: `train/loss` and its like, by the number of the step.

        writer = tpudist.training.WandbWriter(wandb.init(project="digits", resume="allow", id=name))

    W&B takes no numbers of steps before the last one that it has: where a run goes on from a
    checkpoint, those of the steps that are done again stay what they were.
    """

    def __init__(self, run: Any):
        """Of what `wandb.init` returned; the run is not finished at the end, as it is yours.

        Raises:
            TypeError: `run` is none.
        """
        if not callable(getattr(run, "log", None)):
            raise TypeError(
                f"WandbWriter(run={type(run).__name__}): this object has no log(). Pass the run "
                f"that wandb.init(...) returns."
            )
        self._run = run

    def begin(self, history: History) -> None:
        """Nothing: W&B knows the steps that it has."""

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Logs the values."""
        self._run.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def sync(self) -> None:
        """Nothing: W&B sends in the background."""

    def close(self) -> None:
        """Nothing: the run is the caller's."""


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
