"""`train`: runs a step, judges now and then, tells people, saves, and stops when it should."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from tpudist.goodput import goodput as time_records
from tpudist.options import shorten
from tpudist.processes.exit_codes import EXIT_PREEMPTED
from tpudist.strategy.strategy import Strategy
from tpudist.training import metrics_writers
from tpudist.training.display import Display, make_display
from tpudist.training.history import History
from tpudist.training.interrupt import StopOnInterrupt
from tpudist.training.metrics_writers import JsonLinesWriter, MetricsWriter, TensorBoardWriter
from tpudist.training.passes import Passes, count_steps
from tpudist.training.run_checkpoints import RunCheckpoints
from tpudist.training.step_schedule import StepSchedule
from tpudist.training.step_state import StepState
from tpudist.training.steps import make_should_stop

if TYPE_CHECKING:
    from tpudist.checkpoint import Checkpoint
    from tpudist.options import RunOptions

CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints in that of a run."""


def train(
    strategy: Strategy,
    step: Callable[..., Any],
    state: Any,
    data: Any,
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    evaluate: Callable[..., Mapping[str, Any]] | None = None,
    evaluate_every: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    max_to_keep: int | None = 3,
    saved: Checkpoint | None = None,
    writers: Sequence[MetricsWriter] | None = None,
    progress: bool | Display = True,
    items: tuple[str, int] | None = None,
    format_metrics: Callable[[str, Mapping[str, float]], str] | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_start: Callable[[History], None] | None = None,
    exit_when_preempted: bool = True,
    goodput: bool = False,
    options: RunOptions | None = None,
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
        folder: Directory of this run. Use one directory per run: checkpoints of a different state
            or of different data raise an error.
        checkpoint_every: Steps between two checkpoints; by default only one at the end.
        max_to_keep: Number of recent checkpoints to keep; None keeps all.
        saved: Part of the state to save, if not all of it; only for a state that changes in place.
            An example is the adapters of a pretrained model whose other weights are loaded again.
        writers: Writers of the metrics, instead of the files in `folder`. They are not closed.
        progress: Whether the first process shows the progress: a bar on a terminal, lines
            elsewhere.
        items: Unit and number of items in a global batch, such as `("tokens", 4096)`, in which
            throughput is shown; by default steps.
        format_metrics: Called as `format_metrics(split, metrics)`, where the split is `train` or
            `held_out`; returns one line.
        should_stop: Called before each step. If it returns True in any process, the run ends in all
            processes.
        on_start: Called when the state has been restored, before the first step.
        exit_when_preempted: Whether to exit with code 143 after SIGTERM, as a supervisor expects,
            when everything is saved. Otherwise `train` returns with `ended == "preempted"`.
        goodput: Whether to record the use of time in `folder`, for `tpudist doctor folder`.
        options: Options for compiling and calling the step. `RunOptions(donate_argnums=...)` lets a
            pytree state be overwritten in place.

    Returns:
        The history: how the run ended, losses, evaluations and times. Its `state` is the state
        after the last step.

    Raises:
        TypeError: If the step does not return a mapping of metrics, or no state although its state
            is plain pytrees; if a metric is not a scalar; if `evaluate` does not return a mapping;
            if `state` contains an object that cannot be saved; or if `data` is not a dataset.
        ValueError: If a metric differs between replicas; if neither or both of `num_steps` and
            `num_epochs` are given; if `data` has no length for `num_epochs` or ends too early; or
            if two options contradict each other.
        CheckpointError: If the checkpoints in `folder` belong to a different state, or all of them
            are damaged.
        SystemExit: See `exit_when_preempted`.
    """
    begun_s = time.perf_counter()
    _check_options(folder, checkpoint_every, evaluate, evaluate_every, goodput, saved)
    passes = Passes(strategy, data)
    total = count_steps(passes, num_steps, num_epochs)
    is_first = jax.process_index() == 0
    history, step_state = History(), StepState(state)
    if saved is not None and not step_state.is_changed_in_place:
        raise ValueError(
            "train(saved=...): the state is plain pytrees, and each step returns new ones, so "
            "the checkpoint would always contain the initial state. Omit saved to save the "
            "complete state."
        )
    kept_state: Any = step_state.checkpoint if saved is None else saved
    kept_state.step, kept_state.batches, kept_state.history = 0, passes.batches, history
    if goodput and folder is not None:
        time_records.record_goodput(folder)
    checkpoints = None
    if folder is not None:
        checkpoints = RunCheckpoints(
            kept_state,
            history,
            Path(folder) / CHECKPOINTS,
            every=checkpoint_every or 0,
            max_to_keep=max_to_keep,
            cluster_resolver=strategy.cluster_resolver,
        )
        history.restored = checkpoints.restored
    is_given = isinstance(progress, Display)
    display = progress if is_given else make_display(total, quiet=not (progress and is_first))
    kept = _make_writers(folder) if writers is None else writers
    kept = kept if is_first else ()
    run = StepSchedule(
        strategy,
        step,
        step_state,
        passes,
        total,
        display=display,
        writers=kept,
        checkpoints=checkpoints,
        kept_state=kept_state,
        history=history,
        options=options,
        items=items,
        format_metrics=format_metrics,
    )
    stop = StopOnInterrupt(lambda: display.phase("stopping"))
    wants = should_stop or (lambda: False)
    try:
        for writer in kept:
            writer.begin(history)
        run.report_start()
        if on_start is not None:
            on_start(history)
        with stop:
            asked = make_should_stop(strategy, lambda: stop.requested or wants())
            run.loop(evaluate, evaluate_every or total, asked)
    finally:
        if checkpoints is not None:
            checkpoints.close()
        if writers is None:
            for writer in kept:
                writer.close()
        if not is_given:
            display.close()
    history.state, kept_state.step = step_state.value, history.num_steps
    history.total_s = time.perf_counter() - begun_s
    if not is_given:
        run.report_end()
    if history.ended == "preempted" and exit_when_preempted:
        raise SystemExit(EXIT_PREEMPTED)
    return history


def _make_writers(folder: str | os.PathLike[str] | None) -> list[MetricsWriter]:
    if folder is None:
        return []
    made: list[MetricsWriter] = [JsonLinesWriter(folder)]
    return [*made, TensorBoardWriter(folder)] if metrics_writers.has_tensorboard() else made


def _check_options(
    folder: Any,
    checkpoint_every: int | None,
    evaluate: Any,
    evaluate_every: int | None,
    goodput: bool,
    saved: Checkpoint | None,
) -> None:
    for name, value in (("checkpoint_every", checkpoint_every), ("evaluate_every", evaluate_every)):
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if value is not None and not is_count:
            raise ValueError(
                f"train({name}={shorten(value)}): {name} must be a whole number of at least 1."
            )
    needing = {"checkpoint_every": checkpoint_every, "goodput": goodput, "saved": saved}
    for name, value in needing.items():
        if value and folder is None:
            raise ValueError(
                f"train({name}={shorten(value)}) needs a folder. Pass folder='runs/first', or "
                f"omit {name}."
            )
    if evaluate_every is not None and evaluate is None:
        raise ValueError(
            f"train(evaluate_every={evaluate_every}) needs a function to call. Pass evaluate, or "
            f"omit evaluate_every."
        )
