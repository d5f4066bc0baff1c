"""The folder of a run: decides whether to resume the run in it, and lists its files.

`run.json` says what the run there depends on. One process decides; see `agree`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from tpudist.checkpoint.directory import DAMAGED_SUFFIX, Directory
from tpudist.processes import coordination

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None

_PIECE_BYTES = 2**24  # of a file that is read to tell it from others
Resume = Literal["auto", "never", "must"]

CHECKPOINTS = "checkpoints"
FILES = ("run.json", CHECKPOINTS, "metrics.jsonl", "summary.json", "curves.png", "tensorboard")
FILES += ("before.json", "model")
"""Names of the files that a run writes; other files in its folder are never changed."""


@dataclass(frozen=True)
class RunStart:
    """Start of a run in its folder: new or resumed."""

    goes_on: bool
    """Whether there are checkpoints to resume from."""
    planned_steps: int | None = None
    """Number of steps planned when the run began; None for a new run."""
    moved_to: str | None = None
    """Folder to which the files of an earlier run were moved."""


def begin(folder: Path, facts: Mapping[str, Any], num_steps: int, resume: Resume) -> RunStart:
    """Decides whether to resume the run in `folder`, and writes `run.json`. Called by one process.

    Args:
        folder: Folder of the run.
        facts: Options that the run's numbers depend on; must be the same to resume.
        num_steps: Number of steps now planned: the same or more.
        resume: Value of the option `--resume`.

    Raises:
        ValueError: If `folder` has a different run, or has no checkpoint and `resume` is "must".
    """
    known = _read(folder / "run.json")
    there = has_checkpoints(folder / CHECKPOINTS)
    if resume != "never" and there:
        differences = _differences(known, facts, num_steps)
        if differences:
            listed = "".join(f"\n  {difference}" for difference in differences)
            raise ValueError(
                f"--out {folder} contains the checkpoints of a different run:{listed}\n"
                f"To resume that run, use its options. To start a new run, use another --out, or "
                f"--resume never, which moves the old files to {_next_folder(folder)}."
            )
        _write(folder / "run.json", facts, num_steps)
        return RunStart(goes_on=True, planned_steps=known["steps"])
    if resume == "must":
        raise ValueError(
            f"--resume must: --out {folder} has no checkpoint to resume from. Use the folder of "
            f"the run, or omit --resume to start a new run."
        )
    # A start that was killed before its first checkpoint left nothing that this one does not
    # do again.
    same = bool(known) and not there and known == _to_json(facts, known["steps"])
    moved_to = None if same else _move_aside(folder)
    _write(folder / "run.json", facts, num_steps)
    return RunStart(goes_on=False, moved_to=moved_to)


def require_whole(folder: Path, begun: RunStart) -> None:
    """Checks that not all checkpoints are damaged. Called by all processes.

    Raises:
        ValueError: If every checkpoint is damaged.
    """
    if begun.goes_on and not Directory(folder / CHECKPOINTS).steps():
        raise ValueError(
            f"Every checkpoint in {folder} is damaged. Use --resume never, which moves them away "
            f"and starts again."
        )


def has_checkpoints(folder: Path) -> bool:
    """Returns whether there are checkpoints, damaged ones included. Unfinished ones do not count.

    Damaged checkpoints are not a reason to start again silently.
    """
    found = Directory(folder)
    return bool(found.steps()) or any(folder.glob(f"*{DAMAGED_SUFFIX}"))


def digest(*arrays: np.ndarray) -> str:
    """Tells data from others, in 30 characters: how many bytes, and their CRC-32."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(array.tobytes(), checksum)
    return f"{sum(array.nbytes for array in arrays):,} bytes, CRC-32 {checksum:08x}"


def digest_of_files(files: Iterable[Path]) -> str:
    """Tells files from others by all that is in them, in 30 characters, as `digest` does."""
    checksum = size = 0
    for file in files:
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    return f"{size:,} bytes, CRC-32 {checksum:08x}"


def agree(decide: Callable[[], RunStart]) -> RunStart:
    """Returns the decision of process 0 in every process: others may see its files later.

    Raises:
        ValueError: If it raises one in process 0; in every process.
    """
    said: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            said = {"begun": dataclasses.asdict(decide())}
        except ValueError as refused:
            said = {"refused": str(refused)}
    said = json.loads(coordination.Channel("training/folder").exchange(json.dumps(said))[0])
    if "refused" in said:
        raise ValueError(said["refused"])
    return RunStart(**said["begun"])


def agree_on(ask: Callable[[], bool]) -> bool:
    """Returns the answer of process 0 in every process."""
    answer = str(ask()) if jax.process_index() == 0 else ""
    return coordination.Channel("training/question").exchange(answer)[0] == "True"


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Locks the folder against a second run, until the block or this process ends.

    Raises:
        ValueError: If another run uses the folder.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)  # of the folder itself: no file is left behind
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(
            f"--out {folder} is in use by another run. Wait until it ends, or use another folder."
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)


def _to_json(facts: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    return json.loads(json.dumps({"steps": num_steps, "facts": dict(facts)}, default=str))


def _read(file: Path) -> dict[str, Any]:
    """Returns the contents of `run.json`; empty if it is missing or invalid."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return known if isinstance(known["facts"], dict) and int(known["steps"]) else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _write(file: Path, facts: Mapping[str, Any], num_steps: int) -> None:
    # Atomic even if the program is killed: written to another file, then renamed.
    new = file.with_suffix(".new")
    with new.open("w", encoding="utf-8") as out:
        json.dump(_to_json(facts, num_steps), out, indent=2)
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, file)


def _differences(known: Mapping[str, Any], facts: Mapping[str, Any], num_steps: int) -> list[str]:
    if not known:
        return ["run.json, which has the options of that run, is missing or unreadable"]
    there, here = known["facts"], _to_json(facts, num_steps)["facts"]
    found = [
        f"{name} is {here[name]}, that run has {there[name]}"
        for name in here
        if name in there and there[name] != here[name]
    ]
    if num_steps < known["steps"]:
        found.append(
            f"--steps is {num_steps}, that run has {known['steps']}: use at least as many, because "
            f"the learning rate falls over all steps"
        )
    return found


def _next_folder(folder: Path) -> Path:
    taken = [entry.name.removeprefix("earlier-") for entry in folder.glob("earlier-*")]
    return folder / f"earlier-{1 + max((int(n) for n in taken if n.isdigit()), default=0)}"


def _move_aside(folder: Path) -> str | None:
    """Moves what a run wrote into a folder of its own; None if there is nothing."""
    there = [folder / name for name in FILES if (folder / name).exists()]
    if {path.name for path in there} <= {"run.json"}:
        return None
    aside = _next_folder(folder)
    aside.mkdir()
    for path in there:
        path.rename(aside / path.name)
    return str(aside)
