"""The loop: runs steps, judges now and then, tells people, and stops when it should."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from tpudist.strategy.strategy import Strategy
from tpudist.training.history import History
from tpudist.training.saves import Preempted, Saves
from tpudist.training.show.display import Display
from tpudist.training.show.metrics import MetricsWriter

_AHEAD = 2
"""Steps that may be under way before the loss of the oldest is waited for."""


@dataclass(frozen=True)
class Unit:
    """In what a loss is told, and what throughput counts."""

    name: str
    """Unit of the losses that people read, as "bits/byte"."""
    per_nat: float
    """How many of it one nat is."""
    items: str
    """What throughput counts, as "tokens"."""
    items_per_step: int
    """How many items a global batch has."""


def train(
    strategy: Strategy,
    step: Callable[..., jax.Array],
    state: tuple[Any, ...],
    batches: Iterable[Any],
    *,
    num_steps: int,
    unit: Unit,
    evaluate: Callable[[], dict[str, float]],
    evaluate_every: int,
    display: Display,
    metrics: MetricsWriter,
    should_stop: Callable[[], bool] = lambda: False,
    saves: Saves | None = None,
    history: History | None = None,
) -> History:
    """Runs `step(*state, batch)` on each of `batches`, and returns what happened.

    Args:
        strategy: Runs the steps.
        step: Returns the loss of the global batch in nats.
        state: Passed to `step` and changed in place: NNX objects.
        batches: Distributed batches, or their iterator: at least one for each step still to do.
        num_steps: How many steps to do, those of `history` among them.
        unit: How to tell losses and throughput.
        evaluate: Measures on held-out examples; the first thing it measures is the loss in `unit`.
        evaluate_every: Steps between two evaluations; there is one after the last step in any case.
        display: Shows progress.
        metrics: Keeps the numbers.
        should_stop: Asked before each step; must answer alike in all processes.
        saves: Keeps `state` and the position in `batches` now and then, and at the end.
        history: The steps done already, of a run that goes on.
    """
    run = _Run(strategy, step, state, unit, num_steps, display, metrics, saves, history)
    try:
        _steps(run, iter(batches), evaluate, evaluate_every, should_stop)
    except Preempted:
        run.history.ended = "preempted"
    run.settle(keep=0)
    run.save()
    if saves is not None:
        saves.wait()
    return run.history


def _steps(
    run: _Run,
    batches: Any,
    evaluate: Callable[[], dict[str, float]],
    evaluate_every: int,
    should_stop: Callable[[], bool],
) -> None:
    history, saves, first = run.history, run.saves, run.started
    run.display.phase("compiling")
    while True:
        done, last = run.started, run.started == run.num_steps
        # What a run was about to do when it was stopped, it does when it goes on: judge first.
        due = last or (done > 0 and done % evaluate_every == 0)
        if due and not history.was_measured(done):
            run.judge(evaluate)
        if saves is not None and saves.is_due(done):
            run.settle(keep=0)
            run.save()
        if last or history.ended == "diverged":
            return
        if should_stop():
            history.ended = "interrupted"
            return
        run.start(batches)
        run.settle(keep=0 if done == first else _AHEAD)  # no later step waits for compilation
        if done == first:
            run.display.phase("training")


class _Run:
    """The steps under way, and what becomes of their losses."""

    def __init__(
        self,
        strategy: Strategy,
        step: Callable[..., jax.Array],
        state: tuple[Any, ...],
        unit: Unit,
        num_steps: int,
        display: Display,
        metrics: MetricsWriter,
        saves: Saves | None,
        history: History | None,
    ):
        self.history = History() if history is None else history
        self.num_steps = num_steps
        self.display = display
        self.saves = saves
        self.started = self.history.num_steps
        self._strategy, self._step, self._state = strategy, step, state
        self._unit, self._metrics = unit, metrics
        self._under_way: deque[tuple[jax.Array, float]] = deque()
        self._timer = _Timer(self.history, num_steps)
        if saves is not None:
            saves.before_save = self._before_save

    def start(self, batches: Any) -> None:
        """Takes a batch, and starts a step on it."""
        waited_s = batches.waited_s
        batch = next(batches)
        waited_s = batches.waited_s - waited_s
        loss = self._strategy.run(self._step, args=(*self._state, batch))
        self._under_way.append((loss, waited_s))
        self.started += 1

    def settle(self, keep: int) -> None:
        """Waits for steps until only `keep` are under way, and tells what they lost."""
        history = self.history
        while len(self._under_way) > keep and history.ended != "diverged":
            loss, waited_s = self._under_way.popleft()
            loss = float(loss)
            history.num_steps += 1
            history.losses.append(loss)
            if not math.isfinite(loss):
                history.ended = "diverged"
            took_s, typical_s = self._timer.end_step()
            if took_s is not None:
                history.waited_s += waited_s
            left_s = self._timer.left_s
            _report_step(
                history, self._unit, took_s, typical_s, left_s, self.display, self._metrics
            )

    def judge(self, evaluate: Callable[[], dict[str, float]]) -> None:
        """Measures on held-out examples what the steps so far have made of the model."""
        self.settle(keep=0)
        history = self.history
        if history.ended == "diverged":
            return
        self.display.phase("evaluating")
        measured = evaluate()
        history.held_out.append((history.num_steps, measured))
        self._metrics.write(history.num_steps, "held_out", measured)
        told = _format_held_out(measured, self._unit)
        self.display.say(f"step {history.num_steps}/{self.num_steps}  {told}")
        self.display.phase("training")
        self._timer.pause()

    def save(self) -> None:
        """Saves a checkpoint, unless there is one of this step, or nothing worth one."""
        if self.saves is None or self.history.ended == "diverged":
            return
        self.saves.save()
        self._timer.pause()

    def _before_save(self) -> None:
        # The lines of the steps in a checkpoint are on disk before it is.
        self.settle(keep=0)
        self._metrics.sync()


class _Timer:
    """Times steps by when they end; the first after a pause waited for something else."""

    def __init__(self, history: History, num_steps: int):
        self._history = history
        self._num_steps = num_steps
        self._last: float | None = None
        self._recent_s: deque[float] = deque(maxlen=20)

    def end_step(self) -> tuple[float | None, float | None]:
        """Seconds since the step before, if that is what it took; and the mean of recent ones."""
        now = time.perf_counter()
        seconds = None if self._last is None else now - self._last
        self._last = now
        if seconds is not None:
            self._recent_s.append(seconds)
            self._history.seconds.append(seconds)
        return seconds, statistics.mean(self._recent_s) if self._recent_s else None

    def pause(self) -> None:
        self._last = None

    @property
    def left_s(self) -> float | None:
        if not self._recent_s:
            return None
        return statistics.mean(self._recent_s) * (self._num_steps - self._history.num_steps)


def _format_held_out(measured: Mapping[str, float], unit: Unit) -> str:
    (_, score), *others = measured.items()
    rest = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in others)
    return f"held out {score:.3f} {unit.name}" + (f" ({rest})" if rest else "")


def _report_step(
    history: History,
    unit: Unit,
    took_s: float | None,
    typical_s: float | None,
    left_s: float | None,
    display: Display,
    metrics: MetricsWriter,
) -> None:
    loss, step = history.losses[-1], history.num_steps
    values = {"loss": loss, unit.name.replace("/", "_per_"): loss * unit.per_nat}
    if took_s is not None:
        values["step_s"] = took_s
    speed = ""
    if typical_s:
        per_s = unit.items_per_step / typical_s
        values[f"{unit.items}_per_s"] = per_s
        speed = f"{per_s:,.0f} {unit.items}/s"
    metrics.write(step, "train", values)
    display.step(step, f"loss {loss * unit.per_nat:.3f} {unit.name}", speed, left_s)
