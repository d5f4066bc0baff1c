"""Files and names of tpudist that texts mention exist.

Texts are the pages and guides, and the docstrings and comments of the library, its tests and its
scripts. A file that moves leaves its name in them, and no other test reads it.
"""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from places import PACKAGE, ROOT
from syntax import statements

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "docs/*.md",
    "examples/*.md",
    "tpudist/**/README.md",
)
SOURCES = ("tpudist", "tests", "scripts", "examples", "docs")
_FILE = re.compile(r"[\w./{}<>-]*\w\.(?:py|md|sh|ipynb)\b")
_QUOTED = re.compile(r"`+([^`\n]+)`+")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")

# Written like a reference, and none.
NO_REFERENCES = {
    "tpudist.X": "any name",
    "tpudist.A.b": "any name",
    "tpudist.compile": "a logger",
    "tpudist.module.name": "any name",
    "tpudist.values.component.X": "any name",
}


@functools.cache
def texts() -> list[tuple[str, str]]:
    """Each line of the texts, and where it stands."""
    pages = [file for pattern in PAGES for file in sorted(ROOT.glob(pattern))]
    sources = [file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))]
    lines = {file: enumerate(file.read_text().splitlines(), 1) for file in pages}
    lines |= {file: explanations(file.read_text()) for file in sources}
    return [
        (f"{file.relative_to(ROOT)}:{number}", line)
        for file, numbered in lines.items()
        for number, line in numbered
    ]


def explanations(source: str) -> Iterator[tuple[int, str]]:
    """The lines of the docstrings and comments of a source, by number."""
    for node in statements(source):
        if isinstance(node, ast.Expr) and isinstance(text := node.value, ast.Constant):
            if isinstance(text.value, str):
                yield from enumerate(text.value.splitlines(), text.lineno)
    # A tokenizer would tell a comment from a hash in a string, and take longer than all the rest.
    for number, line in enumerate(source.splitlines(), 1):
        if "#" in line:
            yield number, line.partition("#")[2]


def lost_files(line: str) -> list[str]:
    """The files that a line names and the repository lacks.

    A path counts if it begins like a path of this repository; a name without a folder, if quoted.
    """
    found = [name for name in _FILE.findall(line) if "/" in name and _is_ours(name)]
    found = [name for name in found if not any((base / name).exists() for base in _bases())]
    for quoted in _QUOTED.findall(line):
        name = quoted.split(":")[0]
        if _FILE.fullmatch(name) and "/" not in name and not name.startswith("my_"):
            found += [name] if name not in _file_names() else []
    return found


def lost_names(line: str) -> list[str]:
    """The names `tpudist.module.name` and `Class.attribute` in backticks that nothing has."""
    found = []
    for quoted in _QUOTED.findall(line):
        match = _DOTTED.match(quoted)
        if match and match[0] not in NO_REFERENCES and not _exists(match[0].split(".")):
            found.append(match[0])
    return found


def _bases() -> tuple[Path, ...]:
    return ROOT, PACKAGE, ROOT / "tests"


@functools.cache
def _file_names() -> set[str]:
    return {file.name for folder in (*SOURCES, "colab", "") for file in _files(ROOT / folder)}


def _files(folder: Path) -> Iterator[Path]:
    return folder.glob("*") if folder == ROOT else folder.rglob("*")


@functools.cache
def _folders() -> set[str]:
    return {folder.name for base in _bases() for folder in base.iterdir() if folder.is_dir()}


def _is_ours(path: str) -> bool:
    return path.split("/")[0] in _folders() and not re.search(r"[{}<>]", path)


def _exists(parts: list[str]) -> bool:
    """Whether a name exists; names of other projects count as existing."""
    if parts[0] == "tpudist":
        return _reachable(importlib.import_module("tpudist"), parts[1:])
    found = _classes().get(parts[0])
    return not found or any(_reachable(kind, parts[1:]) for kind in found)


def _reachable(owner: object, names: list[str]) -> bool:
    for name in names:
        if inspect.ismodule(owner) and not hasattr(owner, name):
            try:
                owner = importlib.import_module(f"{owner.__name__}.{name}")
            except ModuleNotFoundError:
                return False
        elif hasattr(owner, name):
            owner = getattr(owner, name)
        else:  # what a method sets is there; of what kind it is, nobody says
            return inspect.isclass(owner) and name in _set_by(owner)
    return True


def _set_by(kind: type) -> set[str]:
    """The attributes that a class declares, or that its methods set."""
    found: set[str] = set()
    for base in kind.__mro__:
        found |= set(getattr(base, "__annotations__", ()))
        if base.__module__.startswith("tpudist"):
            found |= set(re.findall(r"\bself\.(\w+)", inspect.getsource(base)))
    return found


@functools.cache
def _classes() -> dict[str, list[type]]:
    """The classes of tpudist by name."""
    found: dict[str, list[type]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[-1] in ("__main__", "pytest_plugin"):
            continue
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__:
                found.setdefault(name, []).append(kind)
    return found


def test_the_files_that_texts_name_exist():
    assert [f"{where}: {name}" for where, line in texts() for name in lost_files(line)] == []


def test_the_names_that_texts_quote_exist():
    assert [f"{where}: {name}" for where, line in texts() for name in lost_names(line)] == []


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("as in tests/test_planner.py, which", ["tests/test_planner.py"]),
        ("see xla/agreement.py", ["xla/agreement.py"]),
        ("`agreement.py` says", ["agreement.py"]),
        ("`tpudist/planner/work.py:make`", ["tpudist/planner/work.py"]),
        ("see `tpudist.xla.agreement`", ["tpudist.xla.agreement"]),
        ("`tpudist.Strategy.walk(x)` and `Strategy.run`", ["tpudist.Strategy.walk"]),
        ("`Strategy.walk`", ["Strategy.walk"]),
        ("`PerReplica.columns`", ["PerReplica.columns"]),
    ],
)
def test_a_reference_to_nothing_is_found(line, lost):
    assert lost_files(line) + lost_names(line) == lost


@pytest.mark.parametrize(
    "line",
    [
        "tests/policy/test_references.py and `xla/mesh.py`, `mesh.py`, docs/planning.md",
        "AI-Hypercomputer/maxtext, layers/pipeline.py; /home/me/tests/train.py",
        "`tests/<package>/test_<file>.py`, my_folder/my_file.py, `my_file.py:make_step`",
        "`tpudist.xla.mesh.make_mesh`, `tpudist.Strategy.run(f)`, `Strategy.extended.update`",
        "`PerReplica.rows`, `trainer.step`, `jax.jit`",
    ],
)
def test_existing_names_and_names_of_other_projects_are_accepted(line):
    assert lost_files(line) + lost_names(line) == []
