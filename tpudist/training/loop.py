"""`train`: runs a step for many batches, evaluates, reports, saves, and stops on request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Never, SupportsFloat

import jax

from tpudist.goodput import goodput
from tpudist.processes.exit_codes import EXIT_PREEMPTED
from tpudist.strategy.strategy import Strategy
from tpudist.training import metrics_writers
from tpudist.training.display import Display, make_display
from tpudist.training.history import History
from tpudist.training.interrupt import StopOnInterrupt
from tpudist.training.metrics_writers import JsonLinesWriter, MetricsWriter, TensorBoardWriter
from tpudist.training.passes import Passes
from tpudist.training.run_checkpoints import RunCheckpoints
from tpudist.training.step_schedule import StepSchedule
from tpudist.training.step_state import StepState
from tpudist.training.steps import make_should_stop
from tpudist.training.train_options import (
    ReportOptions,
    RunFolder,
    StopOptions,
    check_interval,
    refuse_unknown_options,
)

if TYPE_CHECKING:
    from tpudist.checkpoint import Checkpoint
    from tpudist.options import RunOptions

CHECKPOINTS = "checkpoints"
"""Directory of the checkpoints in the directory of a run."""


def train(
    strategy: Strategy,
    step: Callable[..., object],
    state: object,
    data: object,
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    evaluate: Callable[..., Mapping[str, SupportsFloat]] | None = None,
    evaluate_every: int | None = None,
    folder: str | os.PathLike[str] | RunFolder | None = None,
    progress: bool | Display = True,
    report: ReportOptions | None = None,
    stop: StopOptions | None = None,
    options: RunOptions | None = None,
    **moved: Never,
) -> History:
    """Runs `step(*state, batch)` on each batch of `data`, and returns the history of the run.

        history = tpudist.training.train(
            strategy, step, (model, optimizer), data, num_steps=1000, folder="runs/first"
        )

    `strategy.run` calls the step unchanged, so the compiled program equals that of a hand-written
    loop. Metrics are fetched while two later steps run, so devices do not wait for the host.

    With a `folder`, the run is stored in it: checkpoints of the state and of the position in the
    data, `metrics.jsonl`, and with tensorboardX `tensorboard/`. The same call in another process
    then resumes exactly from the newest checkpoint, however the last process ended, and also on
    another mesh. Ctrl-C ends the run after the current step, with a checkpoint. SIGTERM of any
    process does the same in all processes. All processes must make the same call.

    `tf.distribute` has no such function. `tf.keras.Model.fit` is similar, but has a model instead
    of a step.

    Args:
        strategy: Strategy that runs the steps.
        step: Function `step(*state, batch)` of one replica. It returns its metrics, a mapping of
            names to scalars `[]` that are equal on all replicas. If the state is plain pytrees,
            which cannot change in place, it returns `(state, metrics)`. The run ends if the metric
            `loss` is NaN or infinite.
        state: Arguments of the step before the batch: a tuple of objects, one object that is not a
            tuple, or a `TrainState` or `Checkpoint`. The latter two pass their objects, except
            `step` and `batches`, and name them in checkpoints. Otherwise the first two objects of a
            tuple are named `model` and `optimizer` there. NNX objects and Variables change in
            place.
        data: Global batches: an argument or a result of `experimental_distribute_dataset`, or an
            iterator of the result. A dataset is iterated as many times as necessary.
        num_steps: Total number of steps, including the steps before a restart.
        num_epochs: Number of passes through `data`, instead of `num_steps`.
        evaluate: Called as `evaluate(*state)`; returns a mapping of names to numbers. The first
            number is displayed first. See `tpudist.training.evaluate`.
        evaluate_every: Steps between two evaluations. The last step is always evaluated.
        folder: Directory of this run, as a path or as a `RunFolder` with options.
        progress: Whether the first process shows the progress: a bar on a terminal, lines
            elsewhere.
        report: Writers, units and format of the metrics.
        stop: Conditions for an early end.
        options: Options for compiling and calling the step. `RunOptions(donate_argnums=...)` lets a
            pytree state be overwritten in place.
        moved: Nothing. An option that is now in `folder`, `report` or `stop` raises an error that
            names its place.

    Returns:
        The history: how the run ended, losses, evaluations and times. Its `state` is the state
        after the last step.

    Raises:
        TypeError: If the step does not return a mapping of metrics, or no state although its state
            is plain pytrees; if a metric is not a scalar; if `evaluate` does not return a mapping;
            if `state` contains an object that cannot be saved; or if `data` is not a dataset.
        ValueError: If a metric differs between replicas; if neither or both of `num_steps` and
            `num_epochs` are given; if `data` has no length for `num_epochs` or ends too early; or
            if `evaluate_every` is given without `evaluate`.
        CheckpointError: If the checkpoints in `folder` belong to a different state, or all of them
            are damaged.
        SystemExit: See `StopOptions.exit_when_preempted`.
    """
    refuse_unknown_options(moved)
    begun_s = time.perf_counter()
    _check_evaluation(evaluate, evaluate_every)
    report, stop = report or ReportOptions(), stop or StopOptions()
    if folder is not None and not isinstance(folder, RunFolder):
        folder = RunFolder(folder)
    passes = Passes(strategy, data)
    total = passes.count_steps(num_steps, num_epochs)
    history, step_state = History(), StepState(state, None if folder is None else folder.saved)
    # Checkpoints contain these three attributes in addition to the state.
    saved = step_state.saved
    saved.step, saved.batches, saved.history = 0, passes.batches, history
    # Restores the newest checkpoint, so everything that it contains must exist already, and
    # everything below sees the restored history.
    checkpoints = None if folder is None else _open_checkpoints(folder, saved, history, strategy)
    display, own_display = _choose_display(progress, total)
    writers, own_writers = _choose_writers(report, folder)
    schedule = StepSchedule(
        strategy,
        step,
        step_state,
        passes,
        total,
        history=history,
        display=display,
        checkpoints=checkpoints,
        report=report,
        writers=writers,
        options=options,
    )
    try:
        schedule.begin()
        with StopOnInterrupt(lambda: display.set_phase("stopping")) as interrupt:
            wants_stop = stop.should_stop or (lambda: False)
            should_stop = make_should_stop(strategy, lambda: interrupt.requested or wants_stop())
            schedule.run(evaluate, evaluate_every or total, should_stop)
    finally:
        if checkpoints is not None:
            checkpoints.close()
        for writer in own_writers:
            writer.close()
        own_display.close()
    history.state = step_state.value
    saved.step = history.num_steps
    history.total_s = time.perf_counter() - begun_s
    if display is own_display:  # a display of the caller prints its own end
        schedule.print_end()
    # Last, so that the history is complete and printed when the supervisor restarts this process.
    if history.ended == "preempted" and stop.exit_when_preempted:
        raise SystemExit(EXIT_PREEMPTED)
    return history


def _open_checkpoints(
    folder: RunFolder, saved: Checkpoint, history: History, strategy: Strategy
) -> RunCheckpoints:
    """Restores the newest checkpoint of the folder."""
    if folder.goodput:
        goodput.record_goodput(folder.path)
    checkpoints = RunCheckpoints(
        saved,
        history,
        Path(folder.path) / CHECKPOINTS,
        every=folder.checkpoint_every or 0,
        max_to_keep=folder.max_to_keep,
        cluster_resolver=strategy.cluster_resolver,
    )
    history.restored = checkpoints.restored
    return checkpoints


def _check_evaluation(evaluate: object, evaluate_every: int | None) -> None:
    check_interval("train", "evaluate_every", evaluate_every)
    if evaluate_every is not None and evaluate is None:
        raise ValueError(
            f"train(evaluate_every={evaluate_every}) needs a function to call. Pass evaluate, or "
            f"omit evaluate_every."
        )


def _choose_display(progress: bool | Display, total: int) -> tuple[Display, Display]:
    """Returns the display of the run, and the one to close: a silent one if the first is yours."""
    if isinstance(progress, Display):
        return progress, make_display(total, quiet=True)
    display = make_display(total, quiet=not progress or jax.process_index() != 0)
    return display, display


def _choose_writers(
    report: ReportOptions, folder: RunFolder | None
) -> tuple[Sequence[MetricsWriter], Sequence[MetricsWriter]]:
    """Returns the writers of this process, and those of them that `train` must close."""
    # Only the first process writes: the metrics are equal in all, and the folder may be shared.
    if jax.process_index() != 0:
        return (), ()
    if report.writers is not None:
        return report.writers, ()
    own = _make_writers(folder)
    return own, own


def _make_writers(folder: RunFolder | None) -> list[MetricsWriter]:
    if folder is None:
        return []
    writers: list[MetricsWriter] = [JsonLinesWriter(folder.path)]
    if metrics_writers.has_tensorboard():
        writers.append(TensorBoardWriter(folder.path))
    return writers
