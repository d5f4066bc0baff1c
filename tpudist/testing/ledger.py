"""A file that says what steps communicate, for a project to commit and to see changes of.

A collective is named by what it moves and by the function that asks for it, not by its line: an
edit above that line is no change of what the step communicates. The source lines of what changed
are those of the program at hand.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tpudist.xla.estimate.collective_traffic import CollectiveUse

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None

FORMAT = 1
UPDATE = "TPUDIST_UPDATE_LEDGER"
_LIBRARY = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True, order=True)
class Entry:
    """What a step does some number of times, for one function of its source.

    Attributes:
        kind: Such as "all-gather".
        axes: The mesh axes it runs along.
        network: "ici", "dcn" or "host".
        num_bytes: Size of the whole operand or result on one device, per occurrence.
        source: "file::function" that asks for it, the file as seen from the ledger; "" if nobody
            does.
    """

    kind: str
    axes: tuple[str, ...]
    network: str
    num_bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class Record:
    """What one step communicates.

    Attributes:
        mesh: The sizes of the mesh's axes.
        versions: Of the compiler that said so. They are told where something changed, not compared.
        counts: How often a step does what.
    """

    mesh: dict[str, int]
    versions: dict[str, str]
    counts: dict[Entry, float]


def entry(use: CollectiveUse, folder: Path) -> Entry:
    """What a ledger in `folder` calls a collective."""
    return Entry(use.kind, use.axes, use.network, use.num_bytes, function_of(use.source, folder))


def count(uses: Iterable[CollectiveUse], folder: Path) -> dict[Entry, float]:
    """What a step communicates, as a ledger in `folder` has it."""
    counts: dict[Entry, float] = collections.defaultdict(float)
    for use in uses:
        counts[entry(use, folder)] += use.count
    return dict(counts)


def function_of(source: str | None, folder: Path) -> str:
    """The source line "file:line" as "file::function", the file as seen from `folder`.

    The file of an installed package is named from the package on, so that all machines agree.
    """
    if source is None:
        return ""
    file, _, line = source.rpartition(":")
    function = _function(file, int(line))
    return _relative_path(folder, Path(file)) + (f"::{function}" if function else "")


def read(path: Path) -> dict[str, Record]:
    """The records of a ledger, by the names of their steps; none if there is no file.

    Raises:
        ValueError: The file is no ledger, or one of another version of tpudist.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"it has the format {found['format']}")
        return {name: _record(step) for name, step in found["steps"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a ledger of this version of tpudist ({error}), which reads the format "
            f"{FORMAT}. Delete the file, and run the tests with {UPDATE}=1 to write it again."
        ) from error


def add(path: Path, name: str, record: Record) -> None:
    """Writes one record to a ledger, which other tests may be doing at the same moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.parent):
        write(path, {**read(path), name: record})


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keeps others who write ledgers in a folder waiting, processes and threads."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)  # of the folder itself: no file is left behind
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write(path: Path, records: Mapping[str, Record]) -> None:
    """Writes a ledger: sorted, and one collective on a line, so that versions of it compare well.

    The file is replaced at once, so that a test that is interrupted leaves it whole.
    """
    steps = ",\n".join(_step(name, records[name]) for name in sorted(records))
    text = f'{{\n "format": {FORMAT},\n "steps": {{\n{steps}\n }}\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)  # a file of a project, not one of this user's
    os.replace(file.name, path)


def _step(name: str, record: Record) -> str:
    lines = []
    for found in sorted(record.counts):
        fields = dataclasses.asdict(found)
        source = fields.pop("source")
        fields |= {"count": _to_int_if_whole(record.counts[found]), "source": source}
        lines.append(f"    {json.dumps(fields)}")
    collectives = "[\n" + ",\n".join(lines) + "\n   ]" if lines else "[]"
    return (
        f"  {json.dumps(name)}: {{\n"
        f'   "mesh": {json.dumps(record.mesh)},\n'
        f'   "versions": {json.dumps(record.versions, sort_keys=True)},\n'
        f'   "collectives": {collectives}\n'
        f"  }}"
    )


def _record(step: dict[str, Any]) -> Record:
    counts = {}
    for fields in step["collectives"]:
        times = fields.pop("count")
        counts[Entry(**fields | {"axes": tuple(fields["axes"])})] = float(times)
    return Record(step["mesh"], step["versions"], counts)


def _to_int_if_whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _relative_path(folder: Path, file: Path) -> str:
    if file.is_relative_to(_LIBRARY):  # which may be a checkout
        return file.relative_to(_LIBRARY.parent).as_posix()
    for installed in ("site-packages", "dist-packages"):
        if installed in file.parts:
            inside = file.parts[len(file.parts) - file.parts[::-1].index(installed) :]
            return "/".join(inside)
    seen = os.path.relpath(file, folder.resolve())
    # Far from here, the way there is that of one machine.
    return file.name if seen.count("..") > 3 else Path(seen).as_posix()


@functools.lru_cache(maxsize=1024)
def _function(file: str, line: int) -> str:
    """The innermost function or class around a line, as "Block.__call__"; "" if there is none."""
    best: tuple[int, str] = (0, "")
    for begin, end, name in _functions(file):
        if begin <= line <= end and begin > best[0]:
            best = begin, name
    return best[1]


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> list[tuple[int, int, str]]:
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):  # "<stdin>", or gone since
        return []
    found = []

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}" if outer else child.name
                begin = min(x.lineno for x in (child, *child.decorator_list))
                found.append((begin, child.end_lineno or child.lineno, name))
            visit(child, name)

    visit(tree, "")
    return found
