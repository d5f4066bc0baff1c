"""Measures the layers of tpudist: its packages, what they import, and how its files read.

    python scripts/layers.py [--json] [FOLDER]

FOLDER holds a package `tpudist`; by default the repository of this file. The picture of
docs/architecture.md is drawn from the same imports: `python scripts/pictures.py layers`.

A *package* here is a module or a folder at the top of `tpudist/`. An *import* is a package that
imports another one, however often; imports inside functions and under `if TYPE_CHECKING` count. The
*layer* of a package is one above the highest that it imports. A *cycle* is a group of modules, or
of packages, that import each other.
"""

import argparse
import ast
import collections
import functools
import io
import json
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path


@functools.cache
def modules_of(package: Path) -> dict[str, ast.Module]:
    """The modules of a package by name: `xla.mesh`, `xla.__init__` for the folder's own file.

    A stub next to a module counts as part of it: `__init__.pyi` has the imports of `__init__.py`.
    """
    return {
        ".".join(file.relative_to(package).with_suffix("").parts): ast.parse(
            "".join(x.read_text() for x in (file, file.with_suffix(".pyi")) if x.exists())
        )
        for file in sorted(package.rglob("*.py"))
    }


def imports_of(
    modules: Mapping[str, ast.Module], package: str, *, types: bool = False
) -> dict[str, set[str]]:
    """The modules of the package that each of them imports, with `types` for annotations too."""
    return {
        name: {
            module_of(dotted, package, modules)
            for dotted, _ in imported_names(tree, name, package, types=types)
            if dotted.split(".")[0] == package
        }
        - {name}
        for name, tree in modules.items()
    }


def module_of(imported: str, package: str, modules: Collection[str]) -> str:
    """The module that a name comes from: `values.component` of `tpudist.values.component.X`."""
    parts = imported.removeprefix(package).split(".")[1:]
    while parts:
        for name in (".".join(parts), ".".join([*parts, "__init__"])):
            if name in modules:
                return name
        parts.pop()
    return "__init__"


def imported_names(
    tree: ast.Module, name: str, package: str, *, types: bool = False
) -> Iterator[tuple[str, bool]]:
    """Dotted names that a module imports or reaches by attribute (`jax.extend` after `import jax`).

    With each comes whether it is imported when the module is. With `types`, imports under
    `if TYPE_CHECKING` count too.
    """
    for node, at_top in _walk(tree, types):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, at_top
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folder = [package, *name.split(".")[: -node.level]]
                base = ".".join([*folder, *filter(None, [node.module])])
            for alias in node.names:
                yield f"{base}.{alias.name}", at_top
        elif isinstance(node, ast.Attribute) and (dotted := _dotted(node)):
            if dotted.startswith("jax."):
                yield dotted, at_top


def _walk(tree: ast.AST, types: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes below one, and whether they stand outside of functions.

    Those under `if TYPE_CHECKING` are left out, unless `types`.
    """
    stack = [(child, True) for child in ast.iter_child_nodes(tree)]
    while stack:
        node, at_top = stack.pop()
        if not types and isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING"):
            stack += [(child, at_top) for child in node.orelse]
            continue
        yield node, at_top
        at_top &= not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack += [(child, at_top) for child in ast.iter_child_nodes(node)]


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain or a name; an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def cycles_of(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of names that reach each other along the arrows (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(arrows.get(name, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in arrows:
        if name not in index:
            visit(name)
    return found


def packages_of(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The packages that each package imports."""
    packages: dict[str, set[str]] = {}
    for name, others in imports.items():
        package = name.split(".")[0]
        imported = {other.split(".")[0] for other in others} - {package}
        packages.setdefault(package, set()).update(imported)
    return packages


def layers_of(packages: Mapping[str, set[str]]) -> dict[str, int]:
    """The layer of each package, from 1; packages of a cycle stand where they are first met."""
    layers: dict[str, int] = {}

    def layer(package: str, below: frozenset[str]) -> int:
        if package not in layers:
            others = [x for x in packages[package] if x not in below]
            layers[package] = 1 + max((layer(x, below | {package}) for x in others), default=0)
        return layers[package]

    for package in packages:
        layer(package, frozenset([package]))
    return layers


def share_of_any(modules: Mapping[str, ast.Module]) -> float:
    """Percentage of annotated parameters whose annotation is `Any`."""
    annotations = [
        ast.unparse(node.annotation)
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and node.annotation is not None
    ]
    return 100 * sum(text == "Any" for text in annotations) / max(len(annotations), 1)


def share_of_comments(package: Path) -> float:
    """Percentage of non-empty lines that contain a comment."""
    comments = lines = 0
    for file in package.rglob("*.py"):
        text = file.read_text()
        lines += sum(bool(line.strip()) for line in text.splitlines())
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments += sum(token.type == tokenize.COMMENT for token in tokens)
    return 100 * comments / max(lines, 1)


def names_in_dir(folder: Path) -> int | None:
    """Number of public names in `dir` of the imported package."""
    program = "import tpudist; print(sum(not name.startswith('_') for name in dir(tpudist)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    return int(done.stdout) if done.returncode == 0 else None


def _largest_folder(files: Collection[str]) -> str:
    """The folder with most files of its own, as "25 (run)"."""
    folders = collections.Counter(str(Path(file).parent) for file in files)
    [(folder, number)] = folders.most_common(1)
    return f"{number} ({folder})"


def figures(folder: Path) -> dict[str, object]:
    """All figures of the package in a folder."""
    package = folder / "tpudist"
    modules = modules_of(package)
    imports = imports_of(modules, package.name, types=True)
    packages = packages_of(imports)
    sizes = {
        str(file.relative_to(package)): len(file.read_text().splitlines())
        for file in package.rglob("*.py")
    }
    longest = max(sizes, key=lambda name: sizes[name])
    return {
        "packages (entries at the top)": len(packages),
        "layers": max(layers_of(packages).values()),
        # `array_types` has only names for annotations: an import of it couples nothing.
        "imports between packages": sum(len(x - {"array_types"}) for x in packages.values()),
        "cycles of packages": cycles_of(packages),
        "cycles of modules": cycles_of(imports),
        "files in the largest folder": _largest_folder(sizes),
        "modules": len(modules),
        "median module, in lines": statistics.median(sizes.values()),
        "longest module, in lines": f"{sizes[longest]} ({longest})",
        "annotated parameters that are Any, in %": round(share_of_any(modules), 1),
        "lines with a comment, in %": round(share_of_comments(package), 1),
        "names in dir(tpudist)": names_in_dir(folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=Path(__file__).resolve().parents[1], type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = figures(options.folder.resolve())
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        if isinstance(value, list):
            print(f"{name:42}{len(value)}")
            for cycle in value:
                print(f"{'':42}{', '.join(cycle)}")
        else:
            print(f"{name:42}{value}")


if __name__ == "__main__":
    main()
