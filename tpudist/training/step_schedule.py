"""The steps of a run, one after the other, and the work between them.

A step starts while up to two earlier ones still run on the devices, so the host never waits for
the metrics of the step that it has just started. All methods run in one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsFloat

import jax

from tpudist.input.sources.no_batches import NoBatches
from tpudist.strategy.strategy import Strategy
from tpudist.training import step_results
from tpudist.training.display import Display, format_clock
from tpudist.training.history import History
from tpudist.training.metrics_writers import MetricsWriter
from tpudist.training.passes import Passes
from tpudist.training.run_checkpoints import Preempted, RunCheckpoints
from tpudist.training.step_state import StepState
from tpudist.training.step_timer import StepTimer
from tpudist.training.train_options import ReportOptions

if TYPE_CHECKING:
    from tpudist.options import RunOptions

MAX_RUNNING_STEPS = 2
"""Steps that may still run when the next one starts.

With one, a device would be idle while the host reads metrics. More would only delay the metrics,
and with them the stop at a loss that is not finite.
"""


class StepSchedule:
    """The steps of one call of `train`.

    Args:
        strategy: Strategy that runs the steps.
        step: Step of the user.
        state: State of the run, restored from the checkpoint if there is one.
        passes: Batches.
        num_steps: Total number of steps, including those before a restart.
        history: History of the run; its `num_steps` steps are finished.
        display: Progress display of this process.
        checkpoints: Checkpoints of the run; None without a folder.
        report: Units and format of the metrics.
        writers: Writers of this process.
        options: Options of `Strategy.run`.
    """

    def __init__(
        self,
        strategy: Strategy,
        step: Callable[..., object],
        state: StepState,
        passes: Passes,
        num_steps: int,
        *,
        history: History,
        display: Display,
        checkpoints: RunCheckpoints | None,
        report: ReportOptions,
        writers: Sequence[MetricsWriter],
        options: RunOptions | None,
    ):
        self._strategy, self._step, self._options = strategy, step, options
        self._state, self._passes, self._num_steps = state, passes, num_steps
        self._history, self._display, self._checkpoints = history, display, checkpoints
        self._report, self._writers = report, writers
        self._format = report.format_metrics or format_metrics
        # Started minus `history.num_steps`, the finished ones, are the steps in `_running`.
        self._num_started = history.num_steps
        self._metrics_are_checked = False
        # Metrics of a step, and the seconds that it waited for its batch.
        self._running: deque[tuple[Mapping[str, SupportsFloat], float]] = deque()
        self._timer = StepTimer(history, num_steps)
        # The checkpoints exist before this object, because they restore the history. So they get
        # their callback here.
        if checkpoints is not None:
            checkpoints.before_save = self._sync_writers

    def begin(self) -> None:
        """Opens the writers, and reports where the run resumes."""
        history = self._history
        for writer in self._writers:
            writer.begin(history)
        done = history.num_steps
        if history.restored is not None and done >= self._num_steps:
            self._display.print(
                f"This run has already finished: {history.restored} has all {done} steps."
            )
        elif history.restored is not None:
            self._display.print(
                f"Resuming after step {done} of {self._num_steps}, from {history.restored}."
            )
            if done:
                history.resumed_at.append(done)
                self._write("resumed", {"replicas": self._strategy.num_replicas_in_sync})
        if self._report.on_start is not None:
            self._report.on_start(history)

    def run(
        self,
        evaluate: Callable[..., Mapping[str, SupportsFloat]] | None,
        evaluate_every: int,
        should_stop: Callable[[], bool],
    ) -> None:
        """Runs the remaining steps, with evaluations and checkpoints between them; then saves."""
        try:
            self._run_steps(evaluate, evaluate_every, should_stop)
        except Preempted:
            # Raised by the request for the next batch, after the handler has saved: no step is half
            # done.
            self._history.ended = "preempted"
        self._collect()
        self._save()
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _run_steps(
        self,
        evaluate: Callable[..., Mapping[str, SupportsFloat]] | None,
        evaluate_every: int,
        should_stop: Callable[[], bool],
    ) -> None:
        history, checkpoints, first_step = self._history, self._checkpoints, self._num_started
        has_batches = True
        self._display.set_phase("compiling")
        while True:
            # The last of these steps may still run. `_evaluate` and `_save` wait for them.
            started = self._num_started
            is_last = started >= self._num_steps or not has_batches
            # Before each step rather than after it: a run that was stopped between a step and its
            # evaluation then evaluates first when it resumes. `was_measured` is part of the
            # checkpoint, so no evaluation runs twice.
            is_due = is_last or (started > 0 and started % evaluate_every == 0)
            if evaluate is not None and is_due and not history.was_measured(started):
                self._evaluate(evaluate)
            if checkpoints is not None and checkpoints.is_due(started):
                self._collect()
                self._save()
            if is_last or history.ended == "diverged":
                return
            if should_stop():
                history.ended = "interrupted"
                return
            try:
                self._start_step()
            except NoBatches:
                has_batches = False  # the next pass through this loop evaluates, and returns
                continue
            # The first step waits for compilation. If later steps were started meanwhile, their
            # times would contain it.
            self._collect(0 if started == first_step else MAX_RUNNING_STEPS)
            if started == first_step:
                self._display.set_phase("training")

    def _start_step(self) -> None:
        self._timer.begin_step()
        batch, waited_s = self._passes.next_batch(self._num_started, self._num_steps)
        self._state.saved.batches = self._passes.batches  # another iterator after each pass
        args = (*self._state.parts, batch)
        result = self._strategy.run(self._step, args=args, options=self._options)
        metrics = self._state.update(result)
        if not self._metrics_are_checked:
            step_results.check_metrics(metrics)
            self._metrics_are_checked = True
        for value in metrics.values():
            if isinstance(value, jax.Array):
                # The transfer follows the step on the device, so `float(value)` in `_collect` only
                # waits for it.
                value.copy_to_host_async()
        self._running.append((metrics, waited_s))
        self._num_started += 1

    def _collect(self, max_running: int = 0) -> None:
        """Waits until at most `max_running` steps run, and reports the metrics of the others."""
        history = self._history
        # In the order of the steps. After a loss that is not finite, the later steps are dropped:
        # their state is useless, and the history ends with the step that diverged.
        while len(self._running) > max_running and history.ended != "diverged":
            metrics, waited_s = self._running.popleft()
            history.add({name: float(value) for name, value in metrics.items()})
            step_s, mean_s = self._timer.end_step()
            if step_s is not None:
                history.waited_s += waited_s
            self._report_step(step_s, mean_s)

    def _evaluate(self, evaluate: Callable[..., Mapping[str, SupportsFloat]]) -> None:
        self._collect()
        history = self._history
        if history.ended == "diverged":
            return
        self._display.set_phase("evaluating")
        begun_s = time.perf_counter()
        measured = step_results.read_evaluation(evaluate(*self._state.parts))
        history.evaluations_s += time.perf_counter() - begun_s
        history.held_out.append((history.num_steps, measured))
        self._write("held_out", measured)
        text = self._format("held_out", measured)
        self._display.print(f"step {history.num_steps}/{self._num_steps}  held out {text}")
        self._display.set_phase("training")
        self._timer.pause()

    def _save(self) -> None:
        """Saves a checkpoint, unless there is one of this step, or the run has diverged."""
        if self._checkpoints is not None and self._history.ended != "diverged":
            self._checkpoints.save()
            self._timer.pause()

    def print_end(self) -> None:
        """Prints how the run ended, in one line."""
        history = self._history
        parts = [
            f"{history.ended.capitalize()} after {history.num_steps} steps",
            f"{format_clock(history.total_s)}, {history.goodput:.0%} of it in compiled steps",
        ]
        if history.metrics:
            parts.append(self._format("train", history.metrics))
        if history.held_out:
            parts.append(f"held out {self._format('held_out', history.held_out[-1][1])}")
        self._display.print("  ".join(parts))

    def _write(self, split: str, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(self._history.num_steps, split, values)

    def _report_step(self, step_s: float | None, mean_s: float | None) -> None:
        unit, num_items = self._report.items or ("steps", 1)
        values, speed = dict(self._history.metrics), ""
        text = self._format("train", values)
        if step_s is not None:
            values["step_s"] = step_s
        if mean_s:
            values[f"{unit}_per_s"] = per_s = num_items / mean_s
            speed = f"{per_s:,.0f} {unit}/s"
        self._write("train", values)
        self._display.update(self._history.num_steps, text, speed, self._timer.left_s)

    def _sync_writers(self) -> None:
        # Before a checkpoint is written, the metrics of all its steps must be on disk: a resumed
        # run restores its losses from `metrics.jsonl`, and does not run these steps again.
        self._collect()
        for writer in self._writers:
            writer.sync()


def format_metrics(split: str, metrics: Mapping[str, float]) -> str:
    """Returns one line such as `loss 0.512, accuracy 0.870`."""
    del split
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in metrics.items())
