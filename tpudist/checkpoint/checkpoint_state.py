"""The file `checkpoint` of a directory, which records the checkpoint that was saved last there."""

import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

from etils import epath

from tpudist.checkpoint import manifest
from tpudist.checkpoint.directory import TEMPORARY_SUFFIX, Directory
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import is_ours, read_contents
from tpudist.checkpoint.path_checkpoints import is_whole

COUNTER = "save_counter"
"""Note of a checkpoint that `Checkpoint.save` numbered."""
_STATE = "checkpoint"
_PATTERN = re.compile(r'^model_checkpoint_path: (".*")$', re.MULTILINE)


def latest_checkpoint(checkpoint_dir: Any, latest_filename: str | None = None) -> str | None:
    """Returns the path of the checkpoint that was saved last in a directory, or None.

        checkpoint.restore(tpudist.checkpoint.latest_checkpoint("runs/a"))

    `Checkpoint.save` records it in the file `checkpoint`, in TensorFlow's format. Without that file
    it is the newest by its time, or, of the steps of a `CheckpointManager`, the highest. Its files
    are not verified here; `restore` does so.

    Args:
        checkpoint_dir: Directory of the checkpoints; it may be missing.
        latest_filename: Name of another file than `checkpoint`.

    Raises:
        CheckpointError: If the file names a checkpoint that is not there, and no other is.

    As `tf.train.latest_checkpoint`, which returns None if the file is damaged.
    """
    folder = Directory(checkpoint_dir)
    state = folder.path / (latest_filename or _STATE)
    problem = ""
    if state.is_file():
        name = _read(state)
        if name is not None and is_whole(folder.path / name):
            return str(folder.path / name)
        problem = "is damaged" if name is None else f"names {name!r}, which is not a checkpoint"
    found = max(_list_saved(folder.path), default=(0, ""))[1]
    steps = [x for x in folder.steps() if is_ours(folder.step(x))]
    if not found and steps:
        found = str(folder.step(steps[-1]))
    if problem and not found:
        raise CheckpointError(
            f"{state} {problem} of tpudist, and {folder} has no other one. Look at the path; to "
            f"start from scratch, remove that file."
        )
    if problem:
        warnings.warn(f"{state} {problem} of tpudist. The latest is {found}.", stacklevel=2)
    return found or None


def record_latest(path: epath.Path) -> None:
    """Records that the checkpoint at `path` was saved last in its directory."""
    state, name = path.parent / _STATE, json.dumps(path.name, ensure_ascii=False)
    text = f"model_checkpoint_path: {name}\nall_model_checkpoint_paths: {name}\n"
    if manifest.is_remote(path):
        state.write_text(text)
        return
    part = state.with_name(f"{_STATE}.part")
    part.write_text(text)
    part.replace(state)


def _read(state: epath.Path) -> str | None:
    try:
        found = _PATTERN.search(state.read_text())
        return json.loads(found[1]) if found else None
    except ValueError:  # not UTF-8, or not JSON
        return None


def _list_saved(folder: epath.Path) -> Iterator[tuple[float, str]]:
    """When each checkpoint was saved by `Checkpoint.save`, and its path."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and is_ours(path) and not path.name.endswith(TEMPORARY_SUFFIX):
            try:
                contents = read_contents(path)
                if COUNTER in contents["notes"]:
                    yield contents["time"], str(path)
            except (OSError, ValueError, KeyError, TypeError):  # damaged
                continue
