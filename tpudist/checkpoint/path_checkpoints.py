"""Writes and reads checkpoints at paths that the program chooses, as `tf.train.Checkpoint` does.

They have the format of a manager's steps. A new checkpoint replaces an old one only when it is
complete; but in object stores, which cannot rename, the old one is deleted before. Paths of a
replacement, and what a crash after each step leaves:

    1. write PATH.new.orbax-checkpoint-tmp   the old checkpoint
    2. rename it to PATH.new (commit)        both: the next save or restore finishes the replacement
    3. rename PATH to PATH.orbax-...-tmp     only PATH.new, which `restore` finds
    4. rename PATH.new to PATH               the new checkpoint
    5. delete PATH.orbax-...-tmp
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from tpudist.checkpoint import entries, manifest
from tpudist.checkpoint.background_saver import finish_other, make_failure
from tpudist.checkpoint.directory import Directory
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import TEMPORARY_SUFFIX, is_ours, read_notes, read_valid_contents
from tpudist.checkpoint.holders import Container
from tpudist.checkpoint.one_save import Barrier
from tpudist.checkpoint.restore_match import RestoreReport, Selection
from tpudist.checkpoint.save_restore import gather, refuse_not_finite, restore
from tpudist.checkpoint.steps_on_disk import agree, find_problems, require_same
from tpudist.processes import generations
from tpudist.processes.coordination import TIMEOUT_S, Channel

_NEW = ".new"
_numbers = generations.Numbers()


def write_at(
    checkpoint: Container,
    path: str | os.PathLike,
    number: int,
    *,
    notes: dict[str, int],
    allow_nan: bool,
    on_written: Callable[[epath.Path], None] | None = None,
) -> None:
    """Writes the objects of `checkpoint` to `path`; returns in all processes when it is committed.

    Args:
        checkpoint: Container of the objects.
        path: Path of the checkpoint.
        number: Number of the checkpoint.
        notes: Numbers to store with it.
        allow_nan: Whether arrays may contain NaN or infinities.
        on_written: Called in process 0 with the path, after the checkpoint is committed.

    Raises:
        CheckpointError: If something else is at `path`, it cannot be written, or a value cannot
            be saved.
        TypeError: If an object cannot be saved.
    """
    target = _resolve(path)
    channel = Channel(f"checkpoint/path/{next(_numbers)}")
    found = entries.find_entries(checkpoint)
    arrays, contents = gather(found, number, {})
    contents["notes"] = notes
    if not allow_nan:
        refuse_not_finite(found, arrays, number, lambda: f"{target} was not changed.")
    # Three rounds in all processes: the same path, a path to write to, the result. Only process 0
    # changes the directory, and its problems are texts: if it raised between two rounds, the
    # others would wait for it.
    require_same(target, channel, TIMEOUT_S, "write different paths")
    place, problem = agree(lambda: _prepare(target), channel, TIMEOUT_S)
    if problem:
        raise CheckpointError(problem)
    _write(target, epath.Path(place), arrays, contents)
    problem = agree(lambda: _publish(target, on_written), channel, TIMEOUT_S)
    if problem:
        raise CheckpointError(problem)


def _write(
    target: epath.Path,
    place: epath.Path,
    arrays: Mapping[entries.ValuePath, jax.Array | np.ndarray],
    contents: Mapping[str, Any],
) -> None:
    """Writes to `place`, which is `target` or `PATH.new`; returns after the commit."""
    from tpudist.checkpoint.arrays import Writer  # Orbax takes a while to import

    # Before the commit the files are in `hidden`, except in object stores, which cannot rename.
    is_remote = manifest.is_remote(place)
    hidden = place if is_remote else place.with_name(place.name + TEMPORARY_SUFFIX)
    barrier = Barrier(f"checkpoint/path/{next(_numbers)}/writing")
    writer = Writer(barrier, TIMEOUT_S)
    try:
        writer.begin(place, arrays, contents)
        writer.wait()
        barrier.finish_round(None)
    except BaseException as error:  # Ctrl-C too
        barrier.finish_round(error)
        if jax.process_index() == 0:
            hidden.rmtree(missing_ok=True)
        if not isinstance(error, Exception):
            raise
        raise make_failure(f"{target} could not be written", error, "") from error
    finally:
        writer.close()


def read_at(
    checkpoint: Container,
    path: str | os.PathLike | None,
    selection: Selection,
    *,
    verify: bool,
) -> tuple[RestoreReport | None, dict[str, int]]:
    """Restores the objects of `checkpoint` from `path`.

    Returns:
        The report and the notes of the checkpoint; `(None, {})` if `path` is None.

    Raises:
        CheckpointError: If no intact checkpoint is at `path`, it does not match the objects, or
            processes pass different paths.
    """
    target = None if path is None else _resolve(path)
    channel = Channel(f"checkpoint/path/{next(_numbers)}")
    require_same(target, channel, TIMEOUT_S, "restore different paths")
    if target is None:
        return None, {}
    finish_other(str(target.parent))
    place, problem = agree(lambda: _locate(target), channel, TIMEOUT_S)
    place = epath.Path(place)
    if not problem and verify and (problems := find_problems(place, channel, TIMEOUT_S)):
        listed = "\n".join(f"  {x}" for x in problems)
        problem = f"The checkpoint {place} is damaged, so nothing was restored:\n{listed}"
    if problem:
        raise CheckpointError(problem)
    number = read_valid_contents(place)["step"] if is_ours(place) else 0
    notes = read_notes(place)
    return restore(entries.find_entries(checkpoint), number, place, selection), notes


def is_complete(path: epath.Path) -> bool:
    """Returns whether a checkpoint of tpudist is at `path`, or at `path.new` after a crash."""
    return is_ours(path) or is_ours(_new(path))


def _resolve(path: str | os.PathLike) -> epath.Path:
    """Returns the path; a local one is made absolute."""
    return Directory(path).path


def _prepare(target: epath.Path) -> tuple[str, str]:
    """Returns the path to write to, and its problem or "", in process 0."""
    try:
        _finish_replacement(target)
        place = target
        if target.exists():
            if not is_ours(target):
                return "", (
                    f"{target} exists and is not a checkpoint of tpudist, so it was not replaced. "
                    f"Use another path."
                )
            if manifest.is_remote(target):
                target.rmtree()
            else:
                place = _new(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        for old in (
            _new(target),
            *(x.with_name(x.name + TEMPORARY_SUFFIX) for x in (target, place)),
        ):
            old.rmtree(missing_ok=True)
    except OSError as error:
        return "", f"Cannot write {target} ({error}). Use another path, or free disk space."
    return str(place), ""


def _publish(target: epath.Path, on_written: Callable[[epath.Path], None] | None) -> str:
    """Moves a new checkpoint to its path, in process 0; returns the problem or ""."""
    try:
        _finish_replacement(target)
        if on_written is not None:
            on_written(target)
    except OSError as error:
        return f"{target} was written, but could not be renamed or recorded: {error}"
    return ""


def _locate(target: epath.Path) -> tuple[str, str]:
    """Returns the path of a checkpoint, and its problem or "", in process 0."""
    if target.is_dir():
        # A directory that is neither may be a checkpoint of plain Orbax; `find_problems` decides.
        if is_ours(target) or not _list_checkpoints(target):
            return str(target), ""
        return "", (
            f"{target} is a directory of checkpoints, not a checkpoint. Restore "
            f"tpudist.checkpoint.latest_checkpoint({str(target)!r})."
        )
    if is_ours(_new(target)):  # the program was killed between two renames
        return str(_new(target)), ""
    names = _list_checkpoints(target.parent)
    others = (
        f"{target.parent} contains: {', '.join(names)}"
        if names
        else f"{target.parent} contains none"
    )
    return "", f"The checkpoint {target} does not exist. {others}."


def _finish_replacement(target: epath.Path) -> None:
    """Does steps 3 to 5 of a replacement, if `PATH.new` exists."""
    # `PATH.new` gets its name in the commit, so it is complete, and the old one may go.
    new = _new(target)
    if manifest.is_remote(target) or not new.exists():
        return
    if target.exists():
        old = target.with_name(target.name + TEMPORARY_SUFFIX)
        old.rmtree(missing_ok=True)
        target.rename(old)
        new.rename(target)
        old.rmtree()
    else:
        new.rename(target)


def _new(target: epath.Path) -> epath.Path:
    return target.with_name(target.name + _NEW)


def _list_checkpoints(folder: epath.Path) -> list[str]:
    return sorted(x.name for x in folder.iterdir() if is_ours(x)) if folder.is_dir() else []
