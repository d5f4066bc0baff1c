"""What happened in a run so far: what a run that goes on must know of the steps before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class History:
    """What happened in a run, over all its starts; `train` returns it.

    Evaluations are part of a checkpoint (`get_state`). Metrics and times are not: they would make
    each checkpoint larger than the one before, and `metrics.jsonl` has them (`continue_from`).
    """

    ended: Literal["finished", "interrupted", "preempted", "diverged"] = "finished"
    """Why it ended: all steps done, asked to stop, SIGTERM, or a `loss` that is no number."""
    num_steps: int = 0
    """How many steps were done, whoever did them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the last step returned."""
    losses: list[float] = field(default_factory=list)
    """What the last so many steps returned as `loss`: of all, where `metrics.jsonl` was kept."""
    seconds: list[float] = field(default_factory=list)
    """Time of each step but the first of each start, which waits for compilation.

    From when the step before was noted as done, or from the start of the step after an evaluation
    or a save.
    """
    held_out: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(steps done, what was measured) of each evaluation."""
    resumed_at: list[int] = field(default_factory=list)
    """How many steps were done each time that the run went on from a checkpoint."""
    num_earlier_seconds: int = 0
    """How many of `seconds` were measured before the last start, perhaps on other devices."""
    waited_s: float = 0.0
    """Of the `seconds` since the last start, those in which the loop waited for data."""
    num_saves: int = 0
    """Checkpoints saved since the last start."""
    blocked_s: float = 0.0
    """Time in which these held the loop up, in seconds."""
    evaluations_s: float = 0.0
    """Time of the evaluations since the last start, in seconds."""
    total_s: float = 0.0
    """Time of all that `train` did since the last start, in seconds."""
    state: Any = None
    """The state after the last step, in the form in which `train` was given it."""
    restored: str | None = None
    """The path of the checkpoint that the run went on from."""

    @property
    def goodput(self) -> float:
        """Share of the time since the last start that was spent in steps that had been compiled.

        `tpudist.record_goodput` tells more, of all processes and all starts. NaN before the end.
        """
        steps_s = sum(self.seconds[self.num_earlier_seconds :]) - self.waited_s
        return steps_s / self.total_s if self.total_s else math.nan

    @property
    def first_step(self) -> int:
        """The step of the first of `losses`."""
        return self.num_steps - len(self.losses) + 1

    @property
    def mean_step_s(self) -> float:
        """Mean time of a step since the last start (before it, if there is none to time), or NaN.

        In seconds: the time of all timed steps, by their number. What a step processes, divided by
        this, is the throughput.
        """
        seconds = self._recent_seconds
        return statistics.fmean(seconds) if seconds else math.nan

    @property
    def median_step_s(self) -> float:
        """Median time of a step since the last start (before it, if there is none to time), or NaN.

        In seconds. Steps run while the loop goes on, and several may be noted as done at once: the
        median may then be far from `mean_step_s`, which says how fast a run is.
        """
        seconds = self._recent_seconds
        return statistics.median(seconds) if seconds else math.nan

    @property
    def _recent_seconds(self) -> list[float]:
        return self.seconds[self.num_earlier_seconds :] or self.seconds

    @property
    def waited_share(self) -> float:
        """Share of the time of the steps, since the last start, that was spent waiting for data."""
        total_s = sum(self.seconds[self.num_earlier_seconds :])
        return self.waited_s / total_s if total_s else math.nan

    def add(self, metrics: Mapping[str, float]) -> None:
        """Notes what one more step returned."""
        self.num_steps += 1
        self.metrics = dict(metrics)
        if "loss" in metrics:
            self.losses.append(metrics["loss"])
            if not math.isfinite(metrics["loss"]):
                self.ended = "diverged"

    def was_measured(self, step: int) -> bool:
        """Whether held-out examples were judged after `step` steps."""
        return any(measured_at == step for measured_at, _ in self.held_out)

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps; the same in every process."""
        return {"num_steps": self.num_steps, "held_out": [list(each) for each in self.held_out]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's."""
        self.num_steps = int(state["num_steps"])
        self.held_out = [(int(step), dict(measured)) for step, measured in state["held_out"]]

    def continue_from(self, lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Takes up, of the lines of `metrics.jsonl`, what belongs to the steps done.

        Lines of steps after the checkpoint are of a start that did not get to the next one: these
        steps are done again.

        Returns:
            The lines that stay; each step has one at most.
        """
        measured = {step for step, _ in self.held_out}
        kept: dict[Any, Mapping[str, Any]] = {}
        for number, line in enumerate(lines):
            step, split = line.get("step"), line.get("split")
            if not isinstance(step, int) or step > self.num_steps:
                continue
            if split == "held_out" and step not in measured:
                continue  # of an evaluation that no checkpoint knows: it is done again
            kept[(number,) if split == "resumed" else (split, step)] = line
        resumed = [line for line in kept.values() if line.get("split") == "resumed"]
        trained = [line for line in kept.values() if line.get("split") == "train"]
        self.resumed_at = [line["step"] for line in resumed]
        first = self.num_steps + 1
        while ("train", first - 1) in kept:
            first -= 1
        lines_of_steps = [kept["train", step] for step in range(first, self.num_steps + 1)]
        self.losses = [float(line["loss"]) for line in lines_of_steps if "loss" in line]
        self.seconds = [float(line["step_s"]) for line in trained if "step_s" in line]
        self.num_earlier_seconds = len(self.seconds)
        return list(kept.values())
