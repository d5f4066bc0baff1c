"""PreemptionCheckpointHandler: all processes save the same step and exit when one is to end."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from tpudist import step_boundaries
from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager
from tpudist.checkpoint.interval import find_step
from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.cluster_resolver.cluster_spec import ClusterSpec
from tpudist.options import warn_if_given
from tpudist.preemption import termination
from tpudist.preemption.agreed_boundary import BoundaryAgreement
from tpudist.preemption.last_resort import LastResort, Pace
from tpudist.preemption.notice import close_with
from tpudist.preemption.notice_listener import NoticeListener
from tpudist.preemption.termination import URGENT, TerminationConfig
from tpudist.processes import generations
from tpudist.processes.coordination import Channel

T = TypeVar("T")

RUN_CALLS = "checkpointed_runs"
"""Name of the note in a checkpoint with the number of calls of `run`, as in TensorFlow."""

# The last save begins this many steps, and twice the time of a save, before the end of the grace
# period. TensorFlow has the same number of steps.
_STEPS_OF_RESERVE = 6
_log = logging.getLogger("tpudist.preemption")
_numbers = generations.Numbers()


class PreemptionCheckpointHandler:
    """Saves the state and ends the program when this or another process must end soon.

    With a handler, SIGTERM does not end the process at once. At the next boundary between steps
    that all processes can still reach, all of them save, and exit with code 143 through their
    `finally` blocks. A boundary is each `next` of a distributed iterator, in any loop, before it
    takes an element. The calls of `run` and `save_checkpoint_if_preempted` are also boundaries.

    Code between `next` and the step belongs to the step, so a resumed run continues exactly.
    Elements that a program takes ahead, before the step that uses the earlier ones, are lost. A
    program that reaches no boundary ends without saving: after 10 s if it has never reached one,
    otherwise after a minute or four times its longest step, whichever is later.

        handler = tpudist.experimental.PreemptionCheckpointHandler(None, manager)
        for batch in batches:  # restored with the rest
            strategy.run(step, (model, optimizer, batch))

    All processes must create their handlers in the same order, and reach the same boundaries. An
    iterator of a strategy with only one process is not a boundary. Create the handler in the main
    thread: only this thread can handle signals, and only its loops are watched.

    Mirrors `tf.distribute.experimental.PreemptionCheckpointHandler`, in which only `run` is a
    boundary, and which also reports errors of one process to the others.

    Restores the newest intact checkpoint if one exists, and starts to watch for preemption.

    Args:
        cluster_resolver: Resolver that determines the platform. All processes that JAX has
            connected take part.
        checkpoint_or_checkpoint_manager: Checkpoint to save, or the manager that saves.
        checkpoint_dir: Directory of the checkpoints; only for a Checkpoint.
        termination_config: Options: how to detect the end, and what to do then.

    Raises:
        CheckpointError: If checkpoints exist, but all are damaged or do not match the objects.
        NotImplementedError: If the cluster has parameter servers.
        TypeError: If the second argument is neither a Checkpoint nor a manager.
        ValueError: If a Checkpoint has no directory; or if this is not the main thread, and
            there is no `termination_watcher_fn`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ):
        spec = ClusterSpec(cluster_resolver.cluster_spec()) if cluster_resolver else None
        if spec is not None and "ps" in spec.jobs:
            raise NotImplementedError(
                "PreemptionCheckpointHandler does not support a cluster with parameter servers, "
                "because its workers have no common steps. Save from the coordinator, at regular "
                "times."
            )
        self._manager = _require_manager(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._config = termination.fill_defaults(termination_config, cluster_resolver)
        self._manager.restore_or_initialize()
        self._total_run_calls = self._manager.notes.get(RUN_CALLS, 0)

        # A handler acts at most twice: at the first notice (`first`), and if that has a grace
        # period, at its end (`last`). Each time the processes agree on a boundary.
        name = f"preemption/{next(_numbers)}"
        self._name, self._meeting = name, Channel(f"{name}/meeting")
        self._agreement = BoundaryAgreement(f"{name}/first")
        self._listening = NoticeListener(
            self._agreement.notice, self._config.watcher, self._config.grace_after
        )
        self._agreements = [self._agreement]
        self._pace = Pace()
        last_resort = LastResort(self._agreement.notice, self._pace)
        self._close = close_with(self, _make_close(self._listening, self._agreements, last_resort))
        self._is_over = self._is_handling = False
        self._polls_at_last_call = step_boundaries.num_polls()
        self._grace_ends_s = self._last_save_s = 0.0
        self._grace_reason: str | None = None
        # Registered weakly, so that a handler without other references is deleted, and closed.
        step_boundaries.register(self._at_boundary)

    @property
    def total_run_calls(self) -> int:
        """Number of calls of `run`, including those before a restart of the program."""
        return self._total_run_calls

    def run(
        self, distributed_train_function: Callable[..., T], *args: object, **kwargs: object
    ) -> T:
        """Calls the function. Before that is a boundary, unless an element was taken for the call.

        Args:
            distributed_train_function: Function that runs one or several steps.
            *args: Positional arguments of the function.
            **kwargs: Keyword arguments of the function.

        Returns:
            The result of the function.
        """
        if step_boundaries.num_polls() == self._polls_at_last_call:
            self._at_boundary()
        result = distributed_train_function(*args, **kwargs)
        self._end_call()
        return result

    def save_checkpoint_if_preempted(self, *args: object, **kwargs: object) -> None:
        """Marks a boundary: all elements that were taken from iterators have been used.

        Args:
            *args: Positional arguments of `CheckpointManager.save` or `save_fn`, if the state is
                saved here.
            **kwargs: Keyword arguments of the same.
        """
        self._at_boundary(*args, **kwargs)
        self._end_call()

    def _end_call(self) -> None:
        self._total_run_calls += 1
        self._manager.notes[RUN_CALLS] = self._total_run_calls  # also for saves of the program
        self._polls_at_last_call = step_boundaries.num_polls()

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Returns a context manager whose end is a boundary, except after an exception."""
        yield
        self._at_boundary()

    def close(self) -> None:
        """Stops watching and restores SIGTERM; also called when the handler is deleted."""
        self._is_over = True
        step_boundaries.unregister(self._at_boundary)
        self._close()

    def _at_boundary(self, *args: object, **kwargs: object) -> None:
        if self._is_over or self._is_handling:
            return
        self._listening.check()
        self._pace.reach_boundary()
        if self._grace_reason is not None and self._grace_is_over():
            # `_begin_grace` has replaced the agreement: this is the last notice.
            self._agreement.notice.give("the grace period is over")
        if not self._agreement.reach_boundary():
            return
        # A save may reach boundaries itself, for example in an evaluation of `save_fn`.
        self._is_handling = self._pace.has_acted = True
        try:
            notice = self._agreement.notice
            assert notice.content is not None
            # If a process does not arrive, this raises an error that names it, before any writes.
            self._meeting.exchange("")
            _log.warning("%s: saving.", notice.content)
            start = time.monotonic()
            self._save(*args, **kwargs)
            self._last_save_s = time.monotonic() - start
            if self._grace_reason is None and notice.content.grace_s > 0:
                self._begin_grace()
                self._pace.restart()
                return
        finally:
            self._is_handling = False
        self._exit()

    def _begin_grace(self) -> None:
        notice = self._agreement.notice
        assert notice.content is not None
        self._grace_reason = notice.content.why
        if notice.is_from_this_process:
            self._grace_ends_s = notice.given_at_s + notice.content.grace_s
        else:
            # Only the process that must end knows when. When its grace period is over, it gives the
            # second notice, which all processes learn.
            self._grace_ends_s = math.inf
        self._agreement = BoundaryAgreement(f"{self._name}/last")
        self._agreements.append(self._agreement)
        _log.warning(
            "Saved. Training continues during the grace period of %g s.", notice.content.grace_s
        )

    def _grace_is_over(self) -> bool:
        # An urgent reason ends a grace period that another one has begun.
        if self._grace_reason not in URGENT and set(URGENT) & set(self._listening.heard):
            return True
        reserve_s = _STEPS_OF_RESERVE * self._pace.mean_s + 2 * self._last_save_s
        return time.monotonic() > self._grace_ends_s - reserve_s

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
            return
        manager = self._manager
        try:
            manager.wait()  # a save of the program may be running
        except CheckpointError as error:
            _log.warning("%s", error)
        # A program that saves after step k and ends before step k + 1 has saved step k already.
        if not args and not kwargs and self._is_saved():
            return
        manager.notes[RUN_CALLS] = self._total_run_calls
        manager.save(*args, **{"force": True, **kwargs})
        manager.wait()

    def _exit(self) -> None:
        self._is_over = True
        step_boundaries.unregister(self._at_boundary)
        try:
            self._config.exit_fn()
        except BaseException:
            # `finally` blocks run now, and a second SIGTERM must not interrupt them. The exit
            # handler closes the agreements, for which it needs the other processes (`close_with`).
            self._listening.close(process_ends=True)
            raise
        self._close()

    def _is_saved(self) -> bool:
        """Whether a checkpoint of the present step exists, as process 0 sees it."""
        step = find_step(self._manager.checkpoint)
        exists = step is not None and np.asarray(step).tolist() in self._manager.steps
        (answer, *_) = self._meeting.exchange(str(exists))
        return answer == "True"


def _make_close(
    listening: NoticeListener, agreements: list[BoundaryAgreement], last_resort: LastResort
) -> Callable[[bool], None]:
    """Returns a function that closes the parts of a handler, without a reference to the handler."""

    def close(process_ends: bool) -> None:
        last_resort.close()
        listening.close(process_ends)
        for agreement in agreements:
            agreement.close()

    return close


def _require_manager(
    checkpoint: object, directory: str | os.PathLike[str] | None
) -> CheckpointManager:
    if isinstance(checkpoint, CheckpointManager):
        why = "the CheckpointManager has its own directory"
        warn_if_given("PreemptionCheckpointHandler(checkpoint_dir", directory, why)
        return checkpoint
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"PreemptionCheckpointHandler cannot save {type(checkpoint).__name__}. Pass a "
            f"tpudist.checkpoint.CheckpointManager, or a Checkpoint and a checkpoint_dir."
        )
    if not directory:
        raise ValueError(
            "When a checkpoint is passed, a checkpoint_dir must be passed as well. Or pass a "
            "CheckpointManager, which has one."
        )
    return CheckpointManager(checkpoint, directory)
