"""A ledger: a file with the communication of steps, which a project commits to see changes.

An entry names the bytes of a collective and the function that causes it, but not its line: an edit
above that line does not change the communication. Messages about changes have the current lines.
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
"""Version of the file. Raise it if the fields of an `Entry` change."""
UPDATE = "TPUDIST_UPDATE_LEDGER"
"""Environment variable with which a run of the tests replaces records."""
_LIBRARY = Path(__file__).parents[1]
_MAX_PARENTS = 3


@dataclasses.dataclass(frozen=True, order=True)
class Entry:
    """A collective of a step, for one function of its source.

    Attributes:
        kind: Kind, such as "all-gather".
        axes: Mesh axes of the collective.
        network: "ici", "dcn" or "host".
        num_bytes: Bytes of the complete operand or result on one device, per occurrence.
        source: "file::function" that causes it, with a path relative to the ledger; "" if unknown.
    """

    kind: str
    axes: tuple[str, ...]
    network: str
    num_bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class Record:
    """Communication of one step.

    Attributes:
        mesh: Sizes of the axes of the mesh.
        versions: Versions of the compiler, for messages; they are not compared.
        counts: Number of times per step, for each kind of entry.
    """

    mesh: dict[str, int]
    versions: dict[str, str]
    counts: dict[Entry, float]


def entry(use: CollectiveUse, folder: Path) -> Entry:
    """Returns the entry of a collective in a ledger in `folder`."""
    return Entry(use.kind, use.axes, use.network, use.num_bytes, function_of(use.source, folder))


def count(uses: Iterable[CollectiveUse], folder: Path) -> dict[Entry, float]:
    """Returns the communication of a step as in a ledger in `folder`."""
    counts: dict[Entry, float] = collections.defaultdict(float)
    for use in uses:
        counts[entry(use, folder)] += use.count
    return dict(counts)


def function_of(source: str | None, folder: Path) -> str:
    """Returns a source line "file:line" as "file::function", with a path relative to `folder`.

    Functions change less often than line numbers. The path of an installed package starts with the
    package, so all machines agree.
    """
    if source is None:
        return ""
    file, _, line = source.rpartition(":")
    function = _innermost_definition(file, int(line))
    return _relative_path(folder, Path(file)) + (f"::{function}" if function else "")


def read(path: Path) -> dict[str, Record]:
    """Returns the records of a ledger by the names of their steps; empty if there is no file.

    Raises:
        ValueError: If the file is not a ledger, or another version of tpudist wrote it.
    """
    if not path.exists():
        return {}
    try:
        ledger = json.loads(path.read_text())
        if ledger["format"] != FORMAT:
            raise ValueError(f"it has the format {ledger['format']}")
        return {name: _parse_record(step) for name, step in ledger["steps"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a ledger of this version of tpudist ({error}), which reads the format "
            f"{FORMAT}. Delete the file, and run the tests with {UPDATE}=1 to write it again."
        ) from error


def add(path: Path, name: str, record: Record) -> None:
    """Writes one record to a ledger; parallel tests may do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Read, change and replace are one transaction: pytest-xdist runs tests in several processes,
    # and without the lock the last writer would remove the records of the others.
    with _lock(path.parent):
        write(path, {**read(path), name: record})


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Excludes other writers of ledgers in a folder: processes and threads."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)  # locks the folder itself, so that no lock file remains
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write(path: Path, records: Mapping[str, Record]) -> None:
    """Writes a ledger, sorted and with one collective per line, so that diffs are short.

    The file is replaced atomically, so an interrupted test leaves a complete file.
    """
    steps = ",\n".join(_format_step(name, records[name]) for name in sorted(records))
    # Written by hand, because `json.dumps(indent=...)` would spread a collective over eight lines.
    # It must stay valid JSON: `read` parses it with `json`.
    text = f'{{\n "format": {FORMAT},\n "steps": {{\n{steps}\n }}\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)  # temporary files are private, but this one is committed
    os.replace(file.name, path)


def _format_step(name: str, record: Record) -> str:
    lines = []
    for collective in sorted(record.counts):
        fields = dataclasses.asdict(collective)
        source = fields.pop("source")
        fields |= {"count": _to_int_if_whole(record.counts[collective]), "source": source}
        lines.append(f"    {json.dumps(fields)}")
    collectives = "[\n" + ",\n".join(lines) + "\n   ]" if lines else "[]"
    return (
        f"  {json.dumps(name)}: {{\n"
        f'   "mesh": {json.dumps(record.mesh)},\n'
        f'   "versions": {json.dumps(record.versions, sort_keys=True)},\n'
        f'   "collectives": {collectives}\n'
        f"  }}"
    )


def _parse_record(step: dict[str, Any]) -> Record:
    counts = {}
    # A file with other fields raises TypeError in `Entry(...)`, which `read` reports.
    for fields in step["collectives"]:
        times = fields.pop("count")
        counts[Entry(**fields | {"axes": tuple(fields["axes"])})] = float(times)
    return Record(step["mesh"], step["versions"], counts)


def _to_int_if_whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _relative_path(folder: Path, file: Path) -> str:
    # Three cases, from the most to the least stable: our own files by package, installed packages
    # by their path in site-packages, and the user's files relative to the ledger. None of them may
    # contain a home directory or a version of Python, or each machine would write another ledger.
    if file.is_relative_to(_LIBRARY):  # also for a checkout
        return file.relative_to(_LIBRARY.parent).as_posix()
    for installed in ("site-packages", "dist-packages"):
        if installed in file.parts:
            # After the last "site-packages": a virtual environment may be inside another one.
            inside = file.parts[len(file.parts) - file.parts[::-1].index(installed) :]
            return "/".join(inside)
    relative = os.path.relpath(file, folder.resolve())
    # A path through many parents depends on the machine.
    is_far = Path(relative).parts.count("..") > _MAX_PARENTS
    return file.name if is_far else Path(relative).as_posix()


@functools.lru_cache(maxsize=1024)
def _innermost_definition(file: str, line: int) -> str:
    """Returns the innermost function or class around a line, such as "Block.__call__", or ""."""
    around = [(begin, name) for begin, end, name in _definitions(file) if begin <= line <= end]
    # The innermost definition around a line is the one that begins last.
    return max(around, key=lambda pair: pair[0], default=(0, ""))[1]


@functools.lru_cache(maxsize=256)
def _definitions(file: str) -> list[tuple[int, int, str]]:
    try:
        # Bytes, so that Python uses the encoding that the file declares.
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # "<stdin>", a deleted file, or not Python
        return []
    functions = []

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}" if outer else child.name
                # `lineno` is the line of the `def`, but a lambda in a decorator is on an earlier
                # line. So a definition begins with its first decorator.
                begin = min(x.lineno for x in (child, *child.decorator_list))
                functions.append((begin, child.end_lineno or child.lineno, name))
            visit(child, name)

    visit(tree, "")
    return functions
