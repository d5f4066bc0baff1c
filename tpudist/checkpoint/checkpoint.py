"""Checkpoint: a set of named objects, and its methods that save to and restore from a path."""

import os
from collections.abc import Mapping
from typing import Any

from tpudist import context
from tpudist.checkpoint import lost_saves
from tpudist.checkpoint.checkpoint_state import COUNTER, record_latest
from tpudist.checkpoint.holders import Container
from tpudist.checkpoint.path_checkpoints import read_at, write_at
from tpudist.checkpoint.restore_match import Selection, Selector
from tpudist.checkpoint.restore_status import RestoreStatus
from tpudist.goodput import goodput
from tpudist.options import warn_if_given


class Checkpoint(Container):
    """Objects that are saved and restored together, each under its attribute's name.

    Objects may be NNX modules, optimizers, metrics and Rngs, and `tpudist.Variable`s: `restore`
    changes them in place. Arrays and pytrees of them, Python numbers, bools and strings are
    replaced on restore. Objects with `get_state()` and `set_state(state)`, such as a
    `DistributedIterator`, trees of all of these, and other Checkpoints are also supported. None
    stands for no object. Objects that you assign to an attribute later also belong to the
    checkpoint, unless the name begins with `_`.

        checkpoint = tpudist.checkpoint.Checkpoint(model=model, optimizer=optimizer, step=0)
        checkpoint.step += 1

    `CheckpointManager` keeps the checkpoints of a run: it saves in the background and removes old
    checkpoints. `save` and `restore` are for single checkpoints at paths of your own.

    Mirrors `tf.train.Checkpoint`. As in TensorFlow, objects are found through attributes, so
    objects that closures capture are not saved.

    Args:
        **objects: The objects, by name.

    Raises:
        ValueError: If a name begins with `_`, or is the name of a method.
    """

    _save_counter = 0

    def __init__(self, **objects: object):
        # Objects are attributes: one named like a method would hide it from all callers.
        for name, x in objects.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(
                    f"{type(self).__name__}({name}=...): the name {name!r} is reserved. Use a "
                    f"name that is not a method and does not begin with '_'."
                )
            setattr(self, name, x)

    @property
    def save_counter(self) -> int:
        """Number of the last checkpoint that `save` wrote, or that `restore` found."""
        return self._save_counter

    @goodput.count_as(goodput.Phase.CHECKPOINT)
    def save(
        self, file_prefix: str | os.PathLike, options: object = None, *, allow_nan: bool = False
    ) -> str:
        """Saves the objects to `PREFIX-N`, where N counts the saves; returns that path.

            path = checkpoint.save("runs/a/ckpt")  # runs/a/ckpt-1
            checkpoint.restore(path)

        Returns when all is written, in all processes, and records the path for
        `latest_checkpoint`. The count is part of the checkpoint, so a program that restores one
        continues the count. A program that does not restore replaces `PREFIX-1`, as in TensorFlow.

        Args:
            file_prefix: Directory and first part of the name.
            options: For `tf.train.Checkpoint`.
            allow_nan: Whether to save arrays that contain NaN or infinities.

        Raises:
            CheckpointError: If the path cannot be written, or if arrays contain NaN or infinities
                or were donated.
            TypeError: If an object cannot be saved.

        Mirrors `tf.train.Checkpoint.save`, but a checkpoint is a directory, and NaN raises an
        error.
        """
        warn_if_given("Checkpoint.save(options", options, "Orbax's defaults are used")
        context.require_cross_replica("Checkpoint.save")
        # The counter advances only after the write: a save that failed is repeated under its
        # number.
        number = self._save_counter + 1
        path = f"{os.fspath(file_prefix)}-{number}"
        notes = {COUNTER: number}
        with lost_saves.note_at_exit(path):
            write_at(self, path, number, notes=notes, allow_nan=allow_nan, on_written=record_latest)
        self._save_counter = number
        return path

    @goodput.count_as(goodput.Phase.CHECKPOINT)
    def write(
        self, file_prefix: str | os.PathLike, options: object = None, *, allow_nan: bool = False
    ) -> str:
        """Saves the objects to this path; returns it.

        Like `save`, but it neither counts nor records the path. An existing checkpoint at the path
        is replaced when the new one is complete. In an object store, it is removed first.

        Args:
            file_prefix: The path.
            options: For `tf.train.Checkpoint`.
            allow_nan: Whether to save arrays that contain NaN or infinities.

        Raises:
            CheckpointError: If the path cannot be written, or if arrays contain NaN or infinities
                or were donated.
            TypeError: If an object cannot be saved.

        Mirrors `tf.train.Checkpoint.write`.
        """
        warn_if_given("Checkpoint.write(options", options, "Orbax's defaults are used")
        context.require_cross_replica("Checkpoint.write")
        path = os.fspath(file_prefix)
        with lost_saves.note_at_exit(path):
            write_at(self, path, self._save_counter, notes={}, allow_nan=allow_nan)
        return path

    def restore(
        self,
        save_path: str | os.PathLike | None,
        options: object = None,
        *,
        only: Selector | None = None,
        exclude: Selector = (),
        rename: Mapping[str, str] | None = None,
        cast: bool = False,
        verify: bool = True,
    ) -> RestoreStatus:
        """Restores the objects from a checkpoint, in place, and its `save_counter`.

        Values that only the checkpoint or only the objects have are left unchanged, and the
        returned status names them. With `only` or `exclude` they raise an error, as in
        `CheckpointManager.restore`. Shapes and dtypes must always agree.

        Args:
            save_path: Path that `save`, `write`, `latest_checkpoint` or a `CheckpointManager`
                returned. With None nothing is restored.
            options: For `tf.train.Checkpoint`.
            only: Same as in `CheckpointManager.restore`.
            exclude: Same as in `CheckpointManager.restore`.
            rename: Same as in `CheckpointManager.restore`.
            cast: Same as in `CheckpointManager.restore`.
            verify: Same as in `CheckpointManager.restore`.

        Returns:
            The status: `restore(path).assert_consumed()` raises unless all was restored.

        Raises:
            CheckpointError: If no checkpoint is at that path, if it is damaged or does not match
                the objects, or if processes pass different paths (or None). Nothing is restored
                then.

        Mirrors `tf.train.Checkpoint.restore`, but objects that are attached later are not restored.
        """
        selection = Selection(only, exclude, rename, cast, partial=True)
        return self._restore("restore", save_path, options, selection, verify)

    def read(
        self,
        save_path: str | os.PathLike,
        options: object = None,
        *,
        only: Selector | None = None,
        exclude: Selector = (),
        rename: Mapping[str, str] | None = None,
        cast: bool = False,
        verify: bool = True,
    ) -> RestoreStatus:
        """Restores the objects like `restore`, but leaves `save_counter` as it is.

        Mirrors `tf.train.Checkpoint.read`.
        """
        selection = Selection(only, exclude, rename, cast, partial=True)
        return self._restore("read", save_path, options, selection, verify)

    @goodput.count_as(goodput.Phase.CHECKPOINT)
    def _restore(
        self,
        method: str,
        path: str | os.PathLike | None,
        options: object,
        selection: Selection,
        verify: bool,
    ) -> RestoreStatus:
        warn_if_given(f"Checkpoint.{method}(options", options, "Orbax's defaults are used")
        context.require_cross_replica(f"Checkpoint.{method}")
        report, notes = read_at(self, path, selection, verify=verify)
        if report is None:
            return RestoreStatus(None)
        if method == "restore":
            self._save_counter = notes.get(COUNTER, self._save_counter)
        status = RestoreStatus(report)
        # With `only` or `exclude`, `match` has already raised for names that are missing by
        # mistake.
        return status if selection.is_everything else status.expect_partial()

    def checkpoint_objects(self) -> dict[str, Any]:
        """Returns the objects, by name."""
        return {name: x for name, x in vars(self).items() if not name.startswith("_")}

    def __repr__(self) -> str:
        kinds = ", ".join(f"{k}={type(x).__name__}" for k, x in self.checkpoint_objects().items())
        return f"{type(self).__name__}({kinds})"
