"""Checkpoints at paths that the program names, as `tf.train.Checkpoint` writes and reads them.

They have the format of a manager's steps. A new checkpoint replaces an old one only when it is
complete: it is written to `PATH.new` and then renamed.
"""

from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from tpudist.checkpoint import entries, manifest
from tpudist.checkpoint.directory import TEMPORARY_SUFFIX, Directory
from tpudist.checkpoint.entries import Container
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import is_ours, read_notes, read_valid_contents
from tpudist.checkpoint.one_save import Barrier
from tpudist.checkpoint.restore_match import RestoreReport
from tpudist.checkpoint.save_restore import gather, refuse_not_finite, restore
from tpudist.checkpoint.saves_in_order import finish_other, make_failure
from tpudist.checkpoint.steps_on_disk import agree, find_problems, require_same
from tpudist.processes import generations
from tpudist.processes.coordination import TIMEOUT_S, Channel

_NEW = ".new"
_names = generations.Numbers()


def write_at(
    checkpoint: Container,
    path: Any,
    number: int,
    *,
    notes: dict[str, int],
    allow_nan: bool,
    on_written: Callable[[epath.Path], None] | None = None,
) -> None:
    """Writes the objects of `checkpoint` to `path`; returns when all is there, in all processes.

    Args:
        checkpoint: The objects.
        path: Path of the checkpoint.
        number: Number of the checkpoint.
        notes: Numbers to keep with it.
        allow_nan: Whether arrays may hold NaN or infinities.
        on_written: Called in process 0 with the path, when the checkpoint is there.

    Raises:
        CheckpointError: If something else is at `path`, it cannot be written, or a value cannot
            be saved.
        TypeError: If an object cannot be saved.
    """
    target = _resolve(path)
    channel = Channel(f"checkpoint/path/{next(_names)}")
    found = entries.find_entries(checkpoint)
    arrays, contents = gather(found, number, {})
    contents["notes"] = notes
    if not allow_nan:
        refuse_not_finite(found, arrays, number, f"{target} was not changed.")
    require_same(target, channel, TIMEOUT_S, "write different paths")
    place, problem = agree(_prepare(target), channel, TIMEOUT_S)
    if problem:
        raise CheckpointError(problem)
    place = epath.Path(place)

    from tpudist.checkpoint.arrays import Writer  # Orbax takes a while to import

    is_remote = manifest.is_remote(place)
    hidden = place if is_remote else place.with_name(place.name + TEMPORARY_SUFFIX)
    barrier = Barrier(f"checkpoint/path/{next(_names)}/writing")
    writer = Writer(
        lambda: manifest.write(hidden if hidden.exists() else place),
        barrier if jax.process_count() > 1 else None,
        TIMEOUT_S,
    )
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
    problem = agree(_finish(target, on_written), channel, TIMEOUT_S)
    if problem:
        raise CheckpointError(problem)


def read_at(
    checkpoint: Container, path: Any, *, verify: bool, **parts: Any
) -> tuple[RestoreReport | None, dict[str, int]]:
    """Restores the objects of `checkpoint` from `path`.

    Returns:
        The report, and the notes of the checkpoint. If `path` is None: None, and no notes.

    Raises:
        CheckpointError: If no whole checkpoint is at `path`, it does not fit the objects, or
            processes name different paths.
    """
    target = None if path is None else _resolve(path)
    channel = Channel(f"checkpoint/path/{next(_names)}")
    require_same(target, channel, TIMEOUT_S, "restore different paths")
    if target is None:
        return None, {}
    finish_other(str(target.parent))
    place, problem = agree(_locate(target), channel, TIMEOUT_S)
    place = epath.Path(place)
    if not problem and verify and (problems := find_problems(place, channel, TIMEOUT_S)):
        listed = "\n".join(f"  {x}" for x in problems)
        problem = f"The checkpoint {place} is damaged, so nothing was restored:\n{listed}"
    if problem:
        raise CheckpointError(problem)
    number = read_valid_contents(place)["step"] if is_ours(place) else 0
    notes = read_notes(place)
    return restore(entries.find_entries(checkpoint), number, place, **parts), notes


def is_whole(path: epath.Path) -> bool:
    """Returns whether a checkpoint of tpudist is at `path`, or was to replace one there."""
    return is_ours(path) or is_ours(_new(path))


def _resolve(path: Any) -> epath.Path:
    """The path, absolute where it is local."""
    return Directory(path).path


def _prepare(target: epath.Path) -> tuple[str, str]:
    """Returns in process 0 the path to write to, and the problem with it or ""."""
    if jax.process_index():
        return "", ""
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


def _finish(target: epath.Path, on_written: Callable[[epath.Path], None] | None) -> str:
    """Puts a new checkpoint in its place, in process 0; returns the problem or ""."""
    if jax.process_index():
        return ""
    try:
        _finish_replacement(target)
        if on_written is not None:
            on_written(target)
    except OSError as error:
        return f"{target} was written, but could not be renamed or recorded: {error}"
    return ""


def _locate(target: epath.Path) -> tuple[str, str]:
    """Returns in process 0 the path of the checkpoint, and the problem with it or ""."""
    if jax.process_index():
        return "", ""
    if target.is_dir():
        if is_ours(target) or not _list_checkpoints(target):
            return str(target), ""
        return "", (
            f"{target} is a directory of checkpoints, not a checkpoint. Restore "
            f"tpudist.checkpoint.latest_checkpoint({str(target)!r})."
        )
    if is_ours(_new(target)):  # the program was killed between two renames
        return str(_new(target)), ""
    found = _list_checkpoints(target.parent)
    others = (
        f"{target.parent} contains: {', '.join(found)}"
        if found
        else f"{target.parent} contains none"
    )
    return "", f"The checkpoint {target} does not exist. {others}."


def _finish_replacement(target: epath.Path) -> None:
    """Puts a checkpoint that was written to replace another one in its place, if there is one.

    A kill loses neither: `PATH.new` has its name only when complete, and the old one goes then.
    """
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
