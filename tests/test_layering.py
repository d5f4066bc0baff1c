"""Imports point down: each module of tpudist stands on a floor and imports from lower floors only.

A new file needs a place in `FLOORS`; choosing it is the moment to think about what it should
be allowed to know. Imports inside functions count, those under `if TYPE_CHECKING` do not: a type
annotation may name what is above.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tpudist"

# Low to high. An entry is a module or a folder; those of one line do not import each other.
FLOORS = (
    # 0: plain Python, enums and frozen dataclasses
    ("boundaries", "reduce_op", "options", "errors", "identity", "topology_proto"),
    ("deprecated",),
    # 1: the only door to the compiler
    ("xla",),
    # 2: what a value, a place and a variable are, and one call of a replica function
    ("context", "nnx_state", "logical_axes", "placement_rules", "partitioners", "operators"),
    ("tpu_topology",),
    ("values", "component", "colocation", "device_assignment"),
    ("findings", "records"),
    ("frame", "losses", "call", "indexed_slices", "logical_devices"),
    ("signature", "flat_inputs", "scatter", "contents", "destinations", "communication", "on_mesh"),
    ("cross_device_ops", "saved"),
    ("reduction_algorithms",),
    ("variables", "replica_context", "inputs"),
    ("combine", "refusals"),
    ("traced",),
    ("tracing",),
    ("step", "nested", "functions"),
    ("sequence",),
    ("replicate",),
    # 3: where data come from, and who we are
    ("input", "cluster_resolver", "multi_step"),
    ("planner",),  # is given a Strategy; Strategy.plan calls it
    # 4: the strategy, its two hooks, and the methods it keeps for library authors
    ("extended",),
    ("strategy_state",),
    ("strategy",),
    # 5: the state of a training run
    ("optimizer", "microbatches"),
    ("checkpoint",),
    ("train_state", "ledger"),
    ("testing",),
    # 6: are given a Strategy, never name one
    ("coordinator", "preemption"),
    # 7: leaves that nothing of the library needs
    ("strategies", "training", "models"),
    # 8: what users see
    ("deprecated_strategies",),
    ("experimental",),
    ("compat",),
    ("__init__",),
    ("cli", "pytest_plugin"),
    ("__main__",),
)

# Who may import which library (a dotted name covers everything beneath it).
ONLY_IN = {
    "jax._src": ("xla.internals",),  # what has no public door
    "jax.experimental": ("xla",),
    "jax.extend": ("xla",),
    "jaxlib": ("xla",),
    "flax": ("nnx_state", "call", "strategy", "optimizer", "microbatches", "training", "models"),
}

# Never at the top of a module: `import tpudist` must not load them.
ONLY_WHEN_USED = ("keras", "matplotlib", "ray", "sklearn", "tensorboardX", "tensorflow", "pytest")
ONLY_WHEN_USED += ("datasets", "pyarrow", "torch")


def violations(package: Path) -> list[str]:
    """What the modules under `package` import against the rules above, one sentence each."""
    modules = {_name(file, package): file for file in sorted(package.rglob("*.py"))}
    found = []
    for name, file in modules.items():
        if _floor(name) is None:
            found.append(f"{name} has no floor: give it a place in FLOORS.")
            continue
        for imported, at_top in _imports(ast.parse(file.read_text()), name, package.name):
            if imported == package.name or imported.startswith(f"{package.name}."):
                problem = _inside(name, _module(imported, package.name, modules))
            else:
                problem = _outside(name, imported, at_top)
            if problem:
                found.append(problem)
    return found


def _inside(importer: str, imported: str) -> str | None:
    """Whether one module of the package may import another."""
    if importer == imported:
        return None
    high, low = _floor(importer), _floor(imported)
    if high is None or low is None:
        return None  # reported once, where the module itself is looked at
    same_folder = "." in importer and importer.split(".")[0] == imported.split(".")[0]
    if same_folder and importer.startswith("strategies.") and not importer.endswith("__init__"):
        return f"{importer} imports {imported}: a strategy never imports another."
    if high > low or same_folder:
        return None
    return f"{importer} imports {imported}: not from a floor below."


def _outside(importer: str, imported: str, at_top: bool) -> str | None:
    """Whether a module may import another library."""
    for library, allowed in ONLY_IN.items():
        if _covers(library, imported) and not {importer, importer.split(".")[0]} & set(allowed):
            places = f"only {', '.join(allowed)} may" if allowed else "nobody may"
            return f"{importer} imports {imported}: {places}."
    for library in ONLY_WHEN_USED:
        if _covers(library, imported) and at_top and importer != "pytest_plugin":
            return f"{importer} imports {imported} at the top: only where it is used."
    return None


def _floor(name: str) -> int | None:
    """The number of a module's floor; a folder's floor is that of all its modules."""
    for number, members in enumerate(FLOORS):
        if name.split(".")[0] in members:
            return number
    return None


def _name(file: Path, package: Path) -> str:
    """`xla.mesh` for `tpudist/xla/mesh.py`, `xla.__init__` for the folder's own file."""
    return ".".join(file.relative_to(package).with_suffix("").parts)


def _module(imported: str, package: str, modules: dict[str, Path]) -> str:
    """The module that `imported` comes from: `tpudist.values.PerReplica` from `values`."""
    parts = imported.split(".")[1:]
    while parts:
        for name in (".".join(parts), ".".join([*parts, "__init__"])):
            if name in modules:
                return name
        parts.pop()
    return "__init__"


def _imports(tree: ast.Module, name: str, package: str) -> Iterator[tuple[str, bool]]:
    """Dotted names that a module imports or reaches by attribute (`jax.extend` after `import jax`).

    With each comes whether it is imported when the module is.
    """
    for node, at_top in _walk(tree, at_top=True):
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


def _walk(node: ast.AST, at_top: bool) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes but those under `if TYPE_CHECKING`, and whether they stand outside of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _dotted(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other, at_top
                yield from _walk(other, at_top)
            continue
        yield child, at_top
        in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, at_top and not in_function)


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain or a name; an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _covers(library: str, imported: str) -> bool:
    return imported == library or imported.startswith(f"{library}.")


def test_imports_point_down():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("values.py", "from tpudist import strategy", "not from a floor below"),
        ("values.py", "from tpudist.strategy import Strategy", "not from a floor below"),
        ("values.py", "from .strategy import Strategy", "not from a floor below"),
        ("values.py", "def f():\n    import tpudist.strategy", "not from a floor below"),
        ("values.py", "from tpudist import Strategy", "imports __init__"),
        ("options.py", "from tpudist import reduce_op", "not from a floor below"),
        ("xla/mesh.py", "from .. import values", "not from a floor below"),
        ("strategies/tpu.py", "from tpudist.strategies import one_device", "never imports another"),
        ("training/loop.py", "from tpudist.models import convnet", "not from a floor below"),
        ("values.py", "import jax.experimental.pallas", "only xla may"),
        ("values.py", "from jax import experimental", "only xla may"),
        ("values.py", "import jax\nx = jax.extend.core", "only xla may"),
        ("values.py", "import jaxlib", "only xla may"),
        ("xla/mesh.py", "from jax._src import core", "only xla.internals may"),
        ("xla/mesh.py", "import jax\nx = jax._src.core.Jaxpr", "only xla.internals may"),
        ("values.py", "from flax import nnx", "only nnx_state"),
        ("training/loop.py", "import matplotlib.pyplot", "only where it is used"),
        ("utils.py", "", "has no floor"),
    ],
)
def test_a_violation_is_found(tmp_path, file, source, complaint):
    found = violations(_house(tmp_path, {file: source}))
    assert any(complaint in line for line in found), found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("strategy.py", "from tpudist import values, reduce_op\nfrom tpudist.xla import mesh"),
        ("xla/mesh.py", "from jax.experimental import topologies\nfrom . import hlo"),
        ("xla/mesh.py", "from tpudist.xla.hlo import Collective\nimport jaxlib"),
        ("strategies/__init__.py", "from tpudist.strategies.tpu import TPUStrategy"),
        ("__init__.py", "from tpudist import experimental\nfrom tpudist.strategies import tpu"),
        ("training/loop.py", "def f():\n    import matplotlib.pyplot"),
        ("values.py", "import jax\nx = jax.sharding.Mesh"),
        (
            "values.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from tpudist.strategy import Strategy",
        ),
    ],
)
def test_what_the_rules_allow_is_not_reported(tmp_path, file, source):
    assert violations(_house(tmp_path, {file: source})) == []


def _house(folder: Path, sources: dict[str, str]) -> Path:
    """A small package with a module on several floors, some with the given source."""
    files = ["__init__", "experimental", "options", "reduce_op", "strategy", "values"]
    files += ["xla/__init__", "xla/mesh", "xla/hlo", "training/loop", "models/convnet"]
    files += ["strategies/__init__", "strategies/tpu", "strategies/one_device"]
    package = folder / "tpudist"
    for file, source in ({f"{name}.py": "" for name in files} | sources).items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(source)
    return package
