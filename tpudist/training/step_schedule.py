"""The steps of a run, one after the other, and what is due between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from tpudist.input.sources.no_batches import NoBatches
from tpudist.strategy.strategy import Strategy
from tpudist.training import step_results
from tpudist.training.display import Display, clock
from tpudist.training.history import History
from tpudist.training.metrics_writers import MetricsWriter
from tpudist.training.passes import Passes
from tpudist.training.run_checkpoints import Preempted, RunCheckpoints
from tpudist.training.step_state import StepState
from tpudist.training.step_timer import StepTimer

if TYPE_CHECKING:
    from tpudist.options import RunOptions

_AHEAD = 2
"""Steps that may be under way before the metrics of the oldest are waited for."""


class StepSchedule:
    """The steps under way, and what becomes of their metrics."""

    def __init__(
        self,
        strategy: Strategy,
        step: Callable[..., Any],
        state: StepState,
        passes: Passes,
        num_steps: int,
        *,
        display: Display,
        writers: Sequence[MetricsWriter],
        checkpoints: RunCheckpoints | None,
        kept_state: Any,
        history: History,
        options: RunOptions | None,
        items: tuple[str, int] | None,
        format_metrics: Callable[[str, Mapping[str, float]], str] | None,
    ):
        """Of what `train` was given, where the steps that `history` has are done.

        `kept_state` is what checkpoints hold, which are told where the data are.
        """
        self.history, self.num_steps, self.display = history, num_steps, display
        self.checkpoints = checkpoints
        self.started = history.num_steps
        self.items, self.kept_state = items, kept_state
        self.format_metrics = format_metrics or describe_metrics
        self._strategy, self._step, self._options = strategy, step, options
        self._state, self._passes, self._writers = state, passes, writers
        self._is_checked = False
        self._under_way: deque[tuple[Mapping[str, Any], float]] = deque()
        self._timer = StepTimer(history, num_steps)
        if checkpoints is not None:
            checkpoints.before_save = self._before_save

    def loop(
        self,
        evaluate: Callable[..., Mapping[str, Any]] | None,
        evaluate_every: int,
        should_stop: Callable[[], bool],
    ) -> None:
        """Does all steps that are left, and what is due between them; then saves."""
        history = self.history
        try:
            self._do_steps(evaluate, evaluate_every, should_stop)
        except Preempted:
            history.ended = "preempted"
        self.settle(keep=0)
        self.save()
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def _do_steps(
        self,
        evaluate: Callable[..., Mapping[str, Any]] | None,
        evaluate_every: int,
        should_stop: Callable[[], bool],
    ) -> None:
        history, checkpoints, first = self.history, self.checkpoints, self.started
        self.display.phase("compiling")
        while True:
            done, last = self.started, self.started >= self.num_steps
            # What a run was about to do when it was stopped, it does when it goes on: judge first.
            due = last or (done > 0 and done % evaluate_every == 0)
            if evaluate is not None and due and not history.was_measured(done):
                self.judge(evaluate)
            if checkpoints is not None and checkpoints.is_due(done):
                self.settle(keep=0)
                self.save()
            if last or history.ended == "diverged":
                return
            if should_stop():
                history.ended = "interrupted"
                return
            try:
                self.start()
            except NoBatches:
                self.num_steps = 0
                continue
            # No later step waits for compilation.
            self.settle(keep=0 if done == first else _AHEAD)
            if done == first:
                self.display.phase("training")

    def start(self) -> None:
        """Takes a batch, and starts a step on it."""
        self._timer.begin_step()
        batch, waited_s = self._passes.next_batch(self.started, self.num_steps)
        self.kept_state.batches = self._passes.batches
        args = (*self._state.parts, batch)
        result = self._strategy.run(self._step, args=args, options=self._options)
        metrics = self._state.take(result)
        if not self._is_checked:
            step_results.check_metrics(metrics)
            self._is_checked = True
        for value in metrics.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self._under_way.append((metrics, waited_s))
        self.started += 1

    def settle(self, keep: int) -> None:
        """Waits for steps until only `keep` are under way, and tells what they returned."""
        history = self.history
        while len(self._under_way) > keep and history.ended != "diverged":
            metrics, waited_s = self._under_way.popleft()
            history.add({name: float(value) for name, value in metrics.items()})
            took_s, typical_s = self._timer.end_step()
            if took_s is not None:
                history.waited_s += waited_s
            self._report_step(took_s, typical_s)

    def judge(self, evaluate: Callable[..., Mapping[str, Any]]) -> None:
        """Measures what the steps so far have made of the state."""
        self.settle(keep=0)
        history = self.history
        if history.ended == "diverged":
            return
        self.display.phase("evaluating")
        begun_s = time.perf_counter()
        measured = step_results.read_evaluation(evaluate(*self._state.parts))
        history.evaluations_s += time.perf_counter() - begun_s
        history.held_out.append((history.num_steps, measured))
        self._write("held_out", measured)
        told = self.format_metrics("held_out", measured)
        self.display.say(f"step {history.num_steps}/{self.num_steps}  held out {told}")
        self.display.phase("training")
        self._timer.pause()

    def save(self) -> None:
        """Saves a checkpoint, unless there is one of this step, or nothing worth one."""
        if self.checkpoints is None or self.history.ended == "diverged":
            return
        self.checkpoints.save()
        self._timer.pause()

    def report_start(self) -> None:
        """Reports and records where a run resumes."""
        history = self.history
        if history.restored is None:
            return
        done = history.num_steps
        if done >= self.num_steps:
            said = f"This run has already finished: {history.restored} has all {done} steps."
            self.display.say(said)
            return
        self.display.say(
            f"Resuming after step {done} of {self.num_steps}, from {history.restored}."
        )
        if done:
            history.resumed_at.append(done)
            self._write("resumed", {"replicas": self._strategy.num_replicas_in_sync})

    def report_end(self) -> None:
        """Says how the run ended, in a line."""
        history = self.history
        told = [f"{history.ended.capitalize()} after {history.num_steps} steps"]
        told.append(f"{clock(history.total_s)}, {history.goodput:.0%} of it in compiled steps")
        if history.metrics:
            told.append(self.format_metrics("train", history.metrics))
        if history.held_out:
            told.append(f"held out {self.format_metrics('held_out', history.held_out[-1][1])}")
        self.display.say("  ".join(told))

    def _write(self, split: str, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(self.history.num_steps, split, values)

    def _report_step(self, took_s: float | None, typical_s: float | None) -> None:
        name, per_step = self.items or ("steps", 1)
        values, speed = dict(self.history.metrics), ""
        told = self.format_metrics("train", values)
        if took_s is not None:
            values["step_s"] = took_s
        if typical_s:
            values[f"{name}_per_s"] = per_s = per_step / typical_s
            speed = f"{per_s:,.0f} {name}/s"
        self._write("train", values)
        self.display.step(self.history.num_steps, told, speed, self._timer.left_s)

    def _before_save(self) -> None:
        # The lines of the steps in a checkpoint are on disk before it is.
        self.settle(keep=0)
        for writer in self._writers:
            writer.sync()


def describe_metrics(split: str, metrics: Mapping[str, float]) -> str:
    """As `loss 0.512, accuracy 0.870`."""
    del split
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in metrics.items())
