"""Finds the checkpoint that was saved last in a directory; the file `checkpoint` records it."""

import json
import os
import re
import warnings
from collections.abc import Iterator

from etils import epath

from tpudist.checkpoint import manifest
from tpudist.checkpoint.directory import Directory
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import TEMPORARY_SUFFIX, is_ours, read_contents
from tpudist.checkpoint.path_checkpoints import is_complete

COUNTER = "save_counter"
"""Name of the note with the number that `Checkpoint.save` gave to a checkpoint."""
_STATE = "checkpoint"
_PATTERN = re.compile(r'^model_checkpoint_path: (".*")$', re.MULTILINE)


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike, latest_filename: str | None = None
) -> str | None:
    """Returns the path of the last saved checkpoint in a directory, or None.

        checkpoint.restore(tpudist.checkpoint.latest_checkpoint("runs/a"))

    `Checkpoint.save` records it in the file `checkpoint`, in TensorFlow's format. Without that
    file, the newest checkpoint by time counts; in a directory of a `CheckpointManager`, the highest
    step. This function does not verify files; `restore` does.

    Args:
        checkpoint_dir: Directory of the checkpoints; it may be missing.
        latest_filename: Name of the file to read instead of `checkpoint`.

    Raises:
        CheckpointError: If the file names a missing checkpoint, and no other checkpoint exists.

    Mirrors `tf.train.latest_checkpoint`, which returns None if the file is damaged.
    """
    folder = Directory(checkpoint_dir)
    state = folder.path / (latest_filename or _STATE)
    # The checkpoint that the file names, otherwise the newest of `save`. A newer step of a manager
    # takes precedence over both.
    name, problem = None, ""
    if state.is_file():
        name = _read(state)
        if name is None or not is_complete(folder.path / name):
            problem = f"names {name!r}, which is not a checkpoint" if name else "is damaged"
            name = None
    name = name or max(_list_saved(folder), default=(0, None))[1]
    # Both kinds of checkpoints may be in one directory; the file records only those of `save`.
    step = next((x for x in folder.newest_first() if is_ours(folder.step(x))), None)
    if step is not None and (name is None or _time(folder.path / name) < _time(folder.step(step))):
        name = str(step)
    if problem and name is None:
        raise CheckpointError(
            f"{state} {problem} of tpudist, and {folder} contains no other checkpoint. Check the "
            f"path. To start from scratch, delete that file."
        )
    if problem:
        warnings.warn(
            f"{state} {problem} of tpudist. The latest checkpoint is {name}.", stacklevel=2
        )
    return None if name is None else os.path.join(checkpoint_dir, name)


def record_latest(path: epath.Path) -> None:
    """Records that the checkpoint at `path` was saved last in its directory."""
    state, name = path.parent / _STATE, json.dumps(path.name, ensure_ascii=False)
    text = f"model_checkpoint_path: {name}\nall_model_checkpoint_paths: {name}\n"
    if manifest.is_remote(path):
        state.write_text(text)
        return
    # A rename is atomic, so a crash leaves the old file or the new one.
    part = state.with_name(f"{_STATE}.part")
    part.write_text(text)
    part.replace(state)


def _read(state: epath.Path) -> str | None:
    try:
        found = _PATTERN.search(state.read_text())
        return json.loads(found[1]) if found else None
    except ValueError:  # not UTF-8, or not JSON
        return None


def _time(path: epath.Path) -> float:
    """Returns when a checkpoint was saved, in seconds; 0 if that is unknown."""
    try:
        # The time in the checkpoint, not that of the files: a copy of the directory has new files.
        return float(read_contents(path)["time"])
    except (OSError, ValueError, KeyError, TypeError):  # damaged, or renamed
        return 0.0


def _list_saved(folder: Directory) -> Iterator[tuple[float, str]]:
    """Yields the time and the name of each checkpoint that `Checkpoint.save` wrote."""
    for name in folder.names():
        # `save` appends "-N" to a name, so a number is a step of a manager, which may have many.
        if name.isdecimal() or name.endswith(TEMPORARY_SUFFIX):
            continue
        path = folder.path / name
        if path.is_dir() and is_ours(path):
            try:
                contents = read_contents(path)
                if COUNTER in contents["notes"]:
                    yield float(contents["time"]), path.name
            except (OSError, ValueError, KeyError, TypeError):  # damaged
                continue
