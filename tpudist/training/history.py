"""History: the losses, evaluations and times of a run, over all its starts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_KEPT = 100_000  # losses and seconds: 10 MB of the memory of a run, which may have any length


@dataclass
class History:
    """Losses, evaluations and times of a run, over all its starts; `train` returns it.

    Evaluations are part of a checkpoint (`get_state`). Metrics and times are not: they would make
    each checkpoint larger than the previous one, and `metrics.jsonl` has them (`continue_from`).
    """

    ended: Literal["finished", "interrupted", "preempted", "diverged"] = "finished"
    """Cause of the end: all steps done, a stop request, SIGTERM, or a non-finite `loss`."""
    num_steps: int = 0
    """Number of finished steps, over all starts."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step."""
    losses: list[float] = field(default_factory=list)
    """Losses of the last steps, without gaps: at least the last 100,000. A `metrics.jsonl` has all,
    also those of earlier starts."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of the last steps, at least 100,000, except the first of each start, which compiles.

    A step is measured from the end of the previous step, or from its own start after an evaluation
    or a save.
    """
    held_out: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Pairs (finished steps, measured values), one per evaluation."""
    resumed_at: list[int] = field(default_factory=list)
    """Number of finished steps at each resume from a checkpoint."""
    num_earlier_seconds: int = 0
    """Number of entries of `seconds` from before the last start, perhaps on other devices."""
    waited_s: float = 0.0
    """Seconds in which the loop waited for data, as part of `seconds` since the last start."""
    num_saves: int = 0
    """Number of checkpoints saved since the last start."""
    blocked_s: float = 0.0
    """Seconds in which these saves blocked the loop."""
    evaluations_s: float = 0.0
    """Seconds of the evaluations since the last start."""
    total_s: float = 0.0
    """Seconds of the complete call of `train`."""
    state: object = None
    """State after the last step, in the same form as the argument of `train`."""
    restored: str | None = None
    """Path of the checkpoint from which the run resumed; None for a new run."""
    # Sum and number of the seconds since the last start that `seconds` no longer contains.
    _dropped_s: float = 0.0
    _num_dropped: int = 0

    @property
    def goodput(self) -> float:
        """Share of the time since the last start that was spent in compiled steps.

        `tpudist.record_goodput` records more, for all processes and all starts. NaN before the end.
        """
        return (self._steps_s - self.waited_s) / self.total_s if self.total_s else math.nan

    @property
    def first_step(self) -> int:
        """Number of the step of the first entry of `losses`."""
        return self.num_steps - len(self.losses) + 1

    @property
    def mean_step_s(self) -> float:
        """Mean seconds of a step since the last start, or before it if no step was timed since.

        NaN if no step was timed. The throughput is the size of a step divided by this.
        """
        if self._num_dropped:
            num_steps = self._num_dropped + len(self.seconds) - self.num_earlier_seconds
            return self._steps_s / num_steps
        seconds = self._recent_seconds
        return statistics.fmean(seconds) if seconds else math.nan

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step since the last start, or before it if no step was timed since.

        NaN if no step was timed. Steps run in the background, and several may be recorded as done
        at once. Then the median may differ much from `mean_step_s`, which is the speed of the run.
        """
        seconds = self._recent_seconds
        return statistics.median(seconds) if seconds else math.nan

    @property
    def _recent_seconds(self) -> list[float]:
        return self.seconds[self.num_earlier_seconds :] or self.seconds

    @property
    def waited_share(self) -> float:
        """Share of the time of the steps, since the last start, that was spent waiting for data."""
        return self.waited_s / self._steps_s if self._steps_s else math.nan

    @property
    def _steps_s(self) -> float:
        """Seconds of the steps since the last start."""
        return self._dropped_s + sum(self.seconds[self.num_earlier_seconds :])

    def add(self, metrics: Mapping[str, float]) -> None:
        """Records the metrics of one more step."""
        self.num_steps += 1
        self.metrics = dict(metrics)
        if "loss" in metrics:
            self.losses.append(metrics["loss"])
            del self.losses[: _num_surplus(self.losses)]
            if not math.isfinite(metrics["loss"]):
                self.ended = "diverged"

    def add_seconds(self, seconds: float) -> None:
        """Records the seconds of one more step."""
        self.seconds.append(seconds)
        if surplus := _num_surplus(self.seconds):
            dropped = self.seconds[self.num_earlier_seconds : surplus]
            self._dropped_s += sum(dropped)
            self._num_dropped += len(dropped)
            self.num_earlier_seconds = max(0, self.num_earlier_seconds - surplus)
            del self.seconds[:surplus]

    def was_measured(self, step: int) -> bool:
        """Returns whether an evaluation ran after `step` steps."""
        return any(measured_at == step for measured_at, _ in reversed(self.held_out))

    def get_state(self) -> dict[str, Any]:
        """Returns the part that checkpoints contain; it is the same in every process."""
        return {"num_steps": self.num_steps, "held_out": [list(each) for each in self.held_out]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the part that a checkpoint contains."""
        self.num_steps = int(state["num_steps"])
        self.held_out = [(int(step), dict(measured)) for step, measured in state["held_out"]]

    def continue_from(self, lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Restores losses and times of the finished steps from the lines of `metrics.jsonl`.

        Lines of steps after the checkpoint belong to a start that did not reach the next
        checkpoint: these steps run again.

        Returns:
            The lines to keep; at most one per step.
        """
        # A line is kept only if the checkpoint contains its step or evaluation. Lines of one step
        # replace each other, so the last start counts; each resume keeps its own line.
        measured = {step for step, _ in self.held_out}
        kept: dict[Any, Mapping[str, Any]] = {}
        for number, line in enumerate(lines):
            step, split = line.get("step"), line.get("split")
            # A line of another program in the file, or of a step that runs again.
            if not isinstance(step, int) or step > self.num_steps:
                continue
            if split == "held_out" and step not in measured:
                continue  # the checkpoint is older than this evaluation, which runs again
            kept[(number,) if split == "resumed" else (split, step)] = line
        resumed = [line for line in kept.values() if line.get("split") == "resumed"]
        trained = [line for line in kept.values() if line.get("split") == "train"]
        self.resumed_at = [line["step"] for line in resumed]
        # `losses` must be without gaps, because `first_step` is computed from its length. A file
        # that lost lines (another disk, an edit by hand) restores the part after the last gap.
        first = self.num_steps + 1
        while ("train", first - 1) in kept:
            first -= 1
        lines_of_steps = [kept["train", step] for step in range(first, self.num_steps + 1)]
        self.losses = [float(line["loss"]) for line in lines_of_steps if "loss" in line]
        # The first step of each start has no time, so `seconds` may be shorter than `losses`.
        self.seconds = [float(line["step_s"]) for line in trained if "step_s" in line]
        self.num_earlier_seconds = len(self.seconds)
        return list(kept.values())


def _num_surplus(values: Sequence[float]) -> int:
    """Returns the number of oldest values to drop; rarely more than 0, so a step costs the same."""
    return len(values) - MAX_KEPT if len(values) >= 2 * MAX_KEPT else 0
