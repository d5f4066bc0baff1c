"""The folder of a run: whether what is asked for goes on with the run in it, and what is kept.

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
"""What a run writes; nothing else in its folder is touched."""


@dataclass(frozen=True)
class RunStart:
    """How a run begins in its folder."""

    goes_on: bool
    """Whether there are checkpoints to go on from."""
    planned_steps: int | None = None
    """How many steps were planned when the run began, if it goes on."""
    moved_to: str | None = None
    """Where the files of another run were moved that was in the way."""


def begin(folder: Path, facts: Mapping[str, Any], num_steps: int, resume: Resume) -> RunStart:
    """Decides whether the run in `folder` goes on, and writes `run.json`. Called by one process.

    Args:
        folder: The run's.
        facts: What the run's numbers depend on, by options: must be the same to go on.
        num_steps: The steps now planned: the same or more.
        resume: Go on if there is something to go on from; never; or be sure to.

    Raises:
        ValueError: What is there is another run, or there is nothing and `resume` is "must".
    """
    known = _read(folder / "run.json")
    there = has_checkpoints(folder / CHECKPOINTS)
    if resume != "never" and there:
        differences = _differences(known, facts, num_steps)
        if differences:
            listed = "".join(f"\n  {difference}" for difference in differences)
            raise ValueError(
                f"--out {folder} has the checkpoints of another run:{listed}\n"
                f"Give the options of that run to go on with it, another --out to leave it alone, "
                f"or --resume never to start anew, which moves it to {_next_folder(folder)}."
            )
        _write(folder / "run.json", facts, num_steps)
        return RunStart(goes_on=True, planned_steps=known["steps"])
    if resume == "must":
        raise ValueError(
            f"--resume must was given, but --out {folder} has no checkpoint to go on from. Name "
            f"the folder of the run, or leave --resume out to start one."
        )
    # A start that was killed before its first checkpoint left nothing that this one does not
    # do again.
    same = bool(known) and not there and known == _to_json(facts, known["steps"])
    moved_to = None if same else _move_aside(folder)
    _write(folder / "run.json", facts, num_steps)
    return RunStart(goes_on=False, moved_to=moved_to)


def require_whole(folder: Path, begun: RunStart) -> None:
    """Refuses to go on where nothing but damaged checkpoints is left. Called by all processes.

    Raises:
        ValueError: There is none that might be whole.
    """
    if begun.goes_on and not Directory(folder / CHECKPOINTS).steps():
        raise ValueError(
            f"No checkpoint in {folder} is whole. --resume never starts anew, and moves them away."
        )


def has_checkpoints(folder: Path) -> bool:
    """Whether there are any, damaged ones included: these are no reason to start anew in silence.

    One that was not finished is none.
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
    """What process 0 decides, in every process: they may not see its files at the same moment.

    Raises:
        ValueError: It refuses; in every process.
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
    """What process 0 answers, in every process."""
    answer = str(ask()) if jax.process_index() == 0 else ""
    return coordination.Channel("training/question").exchange(answer)[0] == "True"


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keeps a second run out of the folder, until the block or this process ends.

    Raises:
        ValueError: Another run is at work there.
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
            f"--out {folder} is in use by another run. Wait for it to end, or name another folder."
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
    """What `run.json` says; nothing if it is not there or makes no sense."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return known if isinstance(known["facts"], dict) and int(known["steps"]) else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _write(file: Path, facts: Mapping[str, Any], num_steps: int) -> None:
    # Whole or not at all, whenever the program is killed: written beside it, then renamed.
    new = file.with_suffix(".new")
    with new.open("w", encoding="utf-8") as out:
        json.dump(_to_json(facts, num_steps), out, indent=2)
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, file)


def _differences(known: Mapping[str, Any], facts: Mapping[str, Any], num_steps: int) -> list[str]:
    if not known:
        return ["run.json, which says what they are of, is missing or unreadable"]
    there, here = known["facts"], _to_json(facts, num_steps)["facts"]
    found = [
        f"{name} is {here[name]}, there {there[name]}"
        for name in here
        if name in there and there[name] != here[name]
    ]
    if num_steps < known["steps"]:
        found.append(
            f"--steps is {num_steps}, there {known['steps']}: more may be asked for, not fewer, "
            f"since the learning rate falls over all of them"
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
