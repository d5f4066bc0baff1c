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
from tpudist.processes.preemption_service import EXIT_PREEMPTED
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
    """Runs `step(*state, batch)` on each batch of `data`, and returns what happened.

        history = tpudist.training.train(
            strategy, step, (model, optimizer), data, num_steps=1000, folder="runs/first"
        )

    The step is called by `strategy.run`, as it is: the compiled program is that of a loop by hand.
    Its metrics are fetched when two later steps are under way, so that devices do not wait for the
    host. With a `folder` the run is kept in it: checkpoints of the state and of the position in the
    data, `metrics.jsonl`, and with tensorboardX `tensorboard/`. The same call in another process
    then goes on from the newest checkpoint, exactly, whatever ended the last one; on another mesh
    too. Ctrl-C ends the run after the step under way, with a checkpoint; so does SIGTERM of any
    process, in all processes. All processes call this alike.

    `tf.distribute` has no such function; `tf.keras.Model.fit` is what is called so, and has a model
    where this has a step.

    Args:
        strategy: Runs the steps.
        step: `step(*state, batch)` for one replica. It returns its metrics, a mapping of names to
            scalars `[]` that are equal on all replicas; or `(state, metrics)`, where the state is
            plain pytrees, which are not changed in place. A `loss` that is no number ends the run.
        state: What the step is given before the batch: a tuple of objects, one object that is no
            tuple, or a `TrainState` or `Checkpoint`, whose objects but `step` and `batches` are
            meant, and which names them in checkpoints. Without names the first two of a tuple are
            `model` and `optimizer` there. NNX objects and Variables are changed in place.
        data: Global batches: what `experimental_distribute_dataset` takes or gives, or an iterator
            of the latter. A dataset is gone through again as often as need be.
        num_steps: How many steps to do, those before a restart among them.
        num_epochs: How often to go through `data`, instead.
        evaluate: `evaluate(*state)` measures, and returns a mapping of names to numbers, the first
            of which is the one that is shown first. See `tpudist.training.evaluate`.
        evaluate_every: Steps between two evaluations; there is one after the last step in any case.
        folder: Of the run. Another run needs another one: checkpoints of another state, or of other
            data, are refused.
        checkpoint_every: Steps between two checkpoints; by default there is one at the end only.
        max_to_keep: How many checkpoints to keep; None keeps all.
        saved: What of a state that changes in place is in checkpoints, if not all: the adapters of
            a pretrained model, say, whose other weights are loaded anew.
        writers: Where metrics go, instead of into the `folder`; they are not closed at the end.
        progress: Whether to show it: a bar on a terminal, lines elsewhere, of the first process.
        items: What a global batch holds, and how many of it, as `("tokens", 4096)`: throughput is
            told in it. By default in steps.
        format_metrics: `format_metrics(split, metrics)` tells metrics in a line, of the split
            `train` or `held_out`.
        should_stop: Asked before each step; once it is true in any process, the run ends in all.
        on_start: Called when the state has been restored, before the first step.
        exit_when_preempted: Whether to exit with code 143 after SIGTERM, as a supervisor expects,
            once all is saved. Else this returns, with `ended == "preempted"`.
        goodput: Whether to note in the `folder` what time goes to, for `tpudist doctor folder`.
        options: How to compile and call the step; `RunOptions(donate_argnums=...)` has a pytree
            state overwritten in place.

    Returns:
        How it ended, losses, evaluations, times; its `state` is the state after the last step.

    Raises:
        TypeError: The step returns no mapping of metrics, or plain pytrees are its state and it
            returns none; a metric is no scalar; `evaluate` returns no mapping; the `state` holds
            what no checkpoint can; or `data` is no dataset.
        ValueError: A metric differs between replicas; neither or both of `num_steps` and
            `num_epochs` are given; `data` has no length to count epochs by, or ends too early; an
            option contradicts another.
        CheckpointError: The checkpoints in `folder` are of another state, or none is whole.
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
