"""CheckpointManager: the checkpoints of one run in a directory, saved in the background."""

import dataclasses
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tpudist import context
from tpudist.checkpoint import entries, lost_saves
from tpudist.checkpoint.background_saver import BackgroundSaver, finish_other
from tpudist.checkpoint.directory import Directory
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import read_notes
from tpudist.checkpoint.holders import Container
from tpudist.checkpoint.interval import Interval, as_int, find_step
from tpudist.checkpoint.one_save import Barrier
from tpudist.checkpoint.restore_match import RestoreReport, Selection, Selector
from tpudist.checkpoint.retention import Retention
from tpudist.checkpoint.save_restore import gather, refuse_not_finite, restore
from tpudist.checkpoint.steps_on_disk import StepsOnDisk
from tpudist.goodput import goodput
from tpudist.options import shorten, warn_if_given
from tpudist.processes import generations
from tpudist.processes.coordination import TIMEOUT_S, Channel

# Numbers of the managers, for the names of their channels. They are equal in all processes, because
# all create the same managers in the same order.
_numbers = generations.Numbers()


class CheckpointManager:
    """Keeps the checkpoints of one run in a directory, one subdirectory per step.

        with CheckpointManager(checkpoint, "runs/a", max_to_keep=3) as manager:
            manager.restore_or_initialize()
            for batch in batches:
                ...
                manager.save(step)

    A save is atomic: if the program is killed at any moment, the next program finds the newest
    complete state. The checksum of each file is verified before anything is restored. A damaged
    checkpoint is skipped with a warning, and the one before it is used. Values are restored to the
    current placement of the objects, so the mesh may differ from the mesh of the save.

    All processes must create the same managers and call the same methods in the same order. Mirrors
    `tf.train.CheckpointManager`, but numbers are steps, and saves run in the background.

    The first save creates `directory`.

    Args:
        checkpoint: A `Checkpoint` or `TrainState`.
        directory: Local path, or a path in Google Cloud Storage, such as `gs://bucket/run`.
            All processes must see the same files in it.
        max_to_keep: Number of recent checkpoints to keep; None keeps all.
        keep_checkpoint_every_n_hours: Interval in hours. One checkpoint of each interval is
            also kept.
        checkpoint_name: For `tf.train.CheckpointManager`: checkpoints are named by numbers.
        step_counter: Counter of steps for `checkpoint_interval`: a Variable or any number; by
            default the `step` of the checkpoint.
        checkpoint_interval: Minimum number of steps from one save to the next.
        init_fn: Called without arguments by `restore_or_initialize` if no checkpoint exists.
        keep_period: Number of steps. Checkpoints whose number is a multiple of it are also
            kept.
        best: Name of a metric passed to `save`, and `"min"` or `"max"`. The best checkpoint by
            this metric is also kept.
        asynchronous: Whether `save` returns as soon as the state has been copied.
        timeout_s: Maximum seconds for one save, including waiting for other processes.

    Attributes:
        checkpoint: Same as the argument.
        checkpoint_interval: Same as the argument.
        retention: Rules by which checkpoints are kept.
        restored: Report of the last restore; None before it.
        notes: Whole numbers by name that `save` stores with the objects and `restore` sets.

    Raises:
        TypeError: If `checkpoint` is not a `Checkpoint` or `TrainState`, or `directory` is not
            a path.
        ValueError: If a number is out of range, or `checkpoint_interval` has no step counter.
        CheckpointError: If `directory` is a file.
    """

    def __init__(
        self,
        checkpoint: Container,
        directory: str | os.PathLike,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str | None = None,
        step_counter: object = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        *,
        keep_period: int | None = None,
        best: tuple[str, str] | None = None,
        asynchronous: bool = True,
        timeout_s: float = TIMEOUT_S,
    ):
        _require_container(checkpoint)
        warn_if_given(
            "CheckpointManager(checkpoint_name", checkpoint_name, "checkpoints are named by numbers"
        )
        self.checkpoint = checkpoint
        keep_every_s = _seconds(keep_checkpoint_every_n_hours)
        self.retention = Retention(max_to_keep, keep_period, keep_every_s, best)
        self.checkpoint_interval = checkpoint_interval
        self._interval = Interval(checkpoint_interval, step_counter, checkpoint)
        self.restored: RestoreReport | None = None
        self.notes: dict[str, int] = {}
        self._init_fn = init_fn
        self._asynchronous = asynchronous
        self._timeout_s = timeout_s
        self._files = _open_directory(directory)
        number = next(_numbers)
        self._channel = Channel(f"checkpoint/{number}")
        self._on_disk = StepsOnDisk(self._files, self._channel, timeout_s)
        barrier = Barrier(f"checkpoint/{number}/writing")
        self._saver = BackgroundSaver(
            self._files, self._on_disk, self.retention, barrier, timeout_s
        )
        self._is_open = True
        # Only for `save`, which a program may also call in another thread.
        self._lock = threading.RLock()

    # Existing checkpoints.

    @property
    def directory(self) -> str:
        """The path of the directory."""
        return str(self._files)

    @property
    def steps(self) -> list[int]:
        """Numbers of all checkpoints, ascending. The checkpoints are not verified."""
        return self._on_disk.steps()

    @property
    def latest_step(self) -> int | None:
        """Number of the newest checkpoint, or None."""
        return self._on_disk.latest()

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints, oldest first. Mirrors `tf.train.CheckpointManager`."""
        return [str(self._files.step(step)) for step in self.steps]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest checkpoint, or None. Mirrors `tf.train.CheckpointManager`."""
        step = self.latest_step
        return None if step is None else str(self._files.step(step))

    @property
    def best_step(self) -> int | None:
        """Number of the best checkpoint by the metric, or None. It is not verified."""
        return self.retention.best_step(self._on_disk.metrics())

    @property
    def best_checkpoint(self) -> str | None:
        """Path of the best checkpoint by the metric, or None."""
        step = self.best_step
        return None if step is None else str(self._files.step(step))

    def verify(self, step: int) -> list[str]:
        """Returns the problems of the files of a checkpoint; an empty list if it is intact."""
        return self._on_disk.verify(step)

    # Saving.

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: object = None,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        allow_nan: bool = False,
    ) -> str | None:
        """Saves the current state of the checkpoint's objects.

        Returns when their arrays have been copied: then you may change and donate them. The rest of
        the save runs in the background. If it fails there, the next call of `save`, `check`, `wait`
        or `close` raises the error. `save` first waits for an earlier save.

        Args:
            checkpoint_number: Number of the step; by default the `step` of the checkpoint, or if it
                has none, one more than the newest number.
            check_interval: Whether to apply `checkpoint_interval`.
            options: For `tf.train.CheckpointManager`.
            metrics: Numbers to store with the checkpoint, such as the metric of `best`.
            force: Whether to save even before `checkpoint_interval` has passed.
            allow_nan: Whether to save arrays that contain NaN or infinities.

        Returns:
            The path that the checkpoint will have; None if `checkpoint_interval` has not passed.

        Raises:
            CheckpointError: If a checkpoint of that number exists, the directory cannot be written,
                arrays contain NaN or infinities or were donated, or an earlier save failed.
            TypeError: If an object cannot be saved.

        Mirrors `tf.train.CheckpointManager.save`.
        """
        warn_if_given("CheckpointManager.save(options", options, "Orbax's defaults are used")
        context.require_cross_replica("CheckpointManager.save")
        self._require_open()
        with self._lock:
            if check_interval and not force and not self._interval.is_over(self._agree_on_latest):
                return None
            at_exit = lost_saves.note_at_exit(self.directory)
            with goodput.phase(goodput.Phase.CHECKPOINT), at_exit:
                return self._save(checkpoint_number, metrics, allow_nan)

    def check(self) -> None:
        """Raises the error of a save that has failed in the background; returns at once.

        Raises:
            CheckpointError: If the last save failed. The message names the step, the cause and the
                last good checkpoint.
        """
        self._saver.check()

    @goodput.count_as(goodput.Phase.CHECKPOINT)
    def wait(self) -> None:
        """Waits until the running save has finished, in all processes.

        Raises:
            CheckpointError: If the save failed.
        """
        self._saver.wait()

    def close(self) -> None:
        """Waits for the running save, and closes the manager: later saves raise an error.

        Raises:
            CheckpointError: If the save failed.
        """
        self._is_open = False
        self._saver.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failure:  # the error of the block is the one to see
            lost_saves.note(self.directory, str(failure))
            warnings.warn(str(failure), stacklevel=2)

    def _save(
        self, checkpoint_number: int | None, metrics: Mapping[str, float] | None, allow_nan: bool
    ) -> str:
        # The order: the earlier save ends, because there is one writer. Then comes everything that
        # can fail without a change on the disk, such as objects that cannot be saved. Then process
        # 0 prepares the directory, and only then are arrays copied and written.
        self.wait()
        step = self._number(checkpoint_number)
        found = entries.find_entries(self.checkpoint)
        arrays, contents = gather(found, step, self.retention.parse_metrics(metrics))
        contents["notes"] = dict(self.notes)
        if not allow_nan:
            refuse_not_finite(found, arrays, step, self._describe_newest)
        self._on_disk.require_same_step(step)
        finish_other(self.directory)
        self._on_disk.prepare(step)
        self._on_disk.is_clean = False  # if `begin` fails or Ctrl-C interrupts it
        self._saver.begin(step, arrays, contents)
        self._on_disk.is_clean = True  # the saver removes the files of a save that fails later
        self._interval.begin()
        if not self._asynchronous:
            self.wait()
        path = str(self._files.step(step))
        goodput.note_calls("save", path=path)
        return path

    def _describe_newest(self) -> str:
        latest = self.latest_step
        if latest is None:
            return "No checkpoint exists yet."
        return f"The newest checkpoint has step {latest}."

    def _agree_on_latest(self) -> int | None:
        return self._on_disk.agree(self._on_disk.latest)

    def _number(self, requested: int | None) -> int:
        counter = find_step(self.checkpoint) if requested is None else requested
        if counter is None:
            return (self._agree_on_latest() or 0) + 1
        number = as_int(counter)
        if number is None or number < 0:
            raise ValueError(
                f"save(checkpoint_number={shorten(counter)}): checkpoint_number must be a whole "
                f"number of at least 0."
            )
        return number

    # Restoring.

    def restore_or_initialize(self) -> str | None:
        """Restores the newest intact checkpoint; calls `init_fn` if no checkpoint exists.

        Returns:
            The path of the checkpoint, or None.

        Raises:
            CheckpointError: If all existing checkpoints are damaged, or the checkpoint does not
                match the objects. Training never silently starts from scratch.

        Mirrors `tf.train.CheckpointManager.restore_or_initialize`.
        """
        self._wait_for_all()
        if not self._on_disk.agree(lambda: any(True for _ in self._files.newest_first())):
            if self._init_fn is not None:
                self._init_fn()
            return None
        return self._restore(None, Selection(), verify=True).path

    def restore(
        self,
        step: int | None = None,
        *,
        only: Selector | None = None,
        exclude: Selector = (),
        rename: Mapping[str, str] | None = None,
        cast: bool = False,
        verify: bool = True,
    ) -> RestoreReport:
        """Restores all or some of the objects from a checkpoint, in place.

        Each array is placed like the object's current array, or like it was before it was donated.
        Objects may have shapes instead of arrays, such as the results of `nnx.eval_shape`. If
        another program removes the checkpoint meanwhile, a newer checkpoint is used: for example, a
        program that trains, while this one evaluates.

        Args:
            step: Number of the checkpoint; by default the newest intact one.
            only: Objects to restore, one or several: names such as `"model.layer"`, which include
                everything below; patterns such as `"model.*.kernel"`, in which `*` matches any
                text; or types of NNX Variables such as `nnx.Param`. Other values of the checkpoint
                are not restored.
            exclude: Objects that are not restored, in the same form as `only`.
            rename: Maps names or patterns in the checkpoint to names of the objects, such as
                `{"encoder": "model.body", "layers_*.w": "layers.*.kernel"}`. Each `*` stands for
                the same text in both. Names apply before patterns, and longer ones before shorter
                ones.
            cast: Whether to convert arrays to the dtypes of the objects.
            verify: Whether to read all files first and compare their checksums. With False, damage
                may remain undetected, and checkpoints that plain Orbax wrote are accepted.

        Returns:
            A report of the restored and the other values.

        Raises:
            CheckpointError: If the checkpoint does not exist, every checkpoint is damaged, or it
                does not match the objects; the error then lists all differences. Nothing is
                restored then.
            ValueError: If a pattern of `rename` and its new name have different numbers of `*`.
        """
        return self._restore(step, Selection(only, exclude, rename, cast), verify=verify)

    # `restore` and `restore_or_initialize` call this directly: warnings of `choose` count the
    # frames up to their caller (`_OUTSIDE` in `steps_on_disk`).
    @goodput.count_as(goodput.Phase.CHECKPOINT)
    def _restore(self, step: int | None, selection: Selection, *, verify: bool) -> RestoreReport:
        context.require_cross_replica("CheckpointManager.restore")
        self._wait_for_all()
        while True:
            found = entries.find_entries(self.checkpoint)
            chosen, skipped = self._on_disk.choose(step, verify=verify)
            path = self._files.step(chosen)
            try:
                notes = read_notes(path)
                report = restore(found, chosen, path, selection)
                break
            except Exception:
                # The program that trains may have removed it in the meantime. It has saved newer
                # ones, so this ends. Several processes cannot decide this each on its own.
                if jax.process_count() > 1 or path.exists():
                    raise
        goodput.note("restore", path=str(path))
        self.notes = notes  # after `restore`, which changes nothing if it fails
        self.restored = dataclasses.replace(report, skipped=skipped)
        return self.restored

    def _wait_for_all(self) -> None:
        self.wait()
        finish_other(self.directory)

    def _require_open(self) -> None:
        if not self._is_open:
            raise CheckpointError(
                f"The CheckpointManager of {self._files} is closed. Create another "
                f"CheckpointManager."
            )


def _require_container(checkpoint: object) -> None:
    if not isinstance(checkpoint, Container):
        raise TypeError(
            f"CheckpointManager(checkpoint={type(checkpoint).__name__}): checkpoint must be a "
            f"Checkpoint or a TrainState, which name the objects. Pass Checkpoint(model=...)."
        )


def _open_directory(directory: str | os.PathLike) -> Directory:
    files = Directory(directory)
    if files.path.exists() and not files.path.is_dir():
        raise CheckpointError(
            f"CheckpointManager(directory={str(files)!r}): this is a file. Pass a directory."
        )
    return files


def _seconds(hours: float | None) -> float | None:
    # `Retention` rejects other types with a message.
    return hours * 3600 if isinstance(hours, int | float) else hours
