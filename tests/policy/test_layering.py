"""Imports point down: each package of tpudist has a layer and imports from lower layers only.

A new file belongs to a package; a new package needs a place in `PACKAGES`, and choosing it is the
moment to decide what it may know. There is no cycle of imports at any level: between packages,
between the folders and files of a package, between files. Imports inside functions count, and
imports under `if TYPE_CHECKING`, too: a type annotation names a lower layer.
"""

from pathlib import Path

import pytest

import layers
from places import PACKAGE

# Low to high. An entry is a module or a folder; those of one line do not import each other.
PACKAGES = (
    # Names that every package uses, and the bytes of others' messages.
    ("array_types", "options", "reduce_op", "errors", "step_boundaries", "display"),
    ("library_objects", "protobuf_wire"),
    ("goodput", "engine"),
    ("port",),  # reads programs as text, and knows nothing of what they do
    ("xla",),  # the only access to JAX's compiler and runtime
    ("programs",),
    ("processes",),
    ("lowering",),
    ("cluster_resolver",),
    ("context", "supervisor"),
    ("values", "models"),
    ("reductions", "input"),
    ("state",),
    ("run", "checkpoint"),
    ("keras",),
    ("planner", "verification", "gradients", "preemption", "ps"),
    ("strategy",),
    ("strategies", "training", "testing", "coordinator"),
    ("experimental",),
    ("cli",),
    ("compat",),
    ("__init__", "__main__"),
    ("pytest_plugin",),
)

# The folders of a package, low to high: each imports those before it only.
FOLDERS = {
    "processes": ("judge",),
    "port": ("analysis", "operations"),
    "xla": ("hlo", "hardware", "compiler", "estimate"),
    "programs": ("degrees", "jax_errors", "rows"),
    "lowering": ("workarounds",),
    "engine": ("ray",),
    "supervisor": ("doctor",),
    "ps": ("tables",),
    "coordinator": ("rpc", "progress"),
    "preemption": ("survival",),
    "input": ("storage", "file_formats", "transfer", "sources", "feeds"),
    "planner": ("show", "roofline", "layouts"),
    "models": ("parts", "pretrained"),
    "run": ("arguments", "frame", "dispatch", "outputs", "eager", "steady"),
    "compat": ("v1",),
    "cli": ("accelerator",),
}

# Every other file of `strategies` is one strategy, and imports no other.
OF_ALL_STRATEGIES = ("strategies.__init__", "strategies.deprecated_strategies")

# Who may import which library (a dotted name covers everything beneath it).
ONLY_IN = {
    "jax._src": ("xla.internals",),  # private API without a public equivalent
    "jax.experimental": ("xla", "programs", "lowering"),
    "jax.extend": ("xla", "programs", "lowering"),
    "jaxlib": ("xla", "programs", "lowering"),
    "keras": ("keras",),
    "ray": ("engine.ray.ray_session",),
    "grpc": ("coordinator.rpc.grpc_layer",),
    "libcst": ("port",),
    "fsspec": ("input.storage.filesystems",),
    "flax": (
        "state",
        "run",
        "strategy",
        "gradients",
        "training",
        "models",
        "cli.accelerator.numeric_checks",
    ),
}

# Never at the top of a module: `import tpudist` must not load them.
ONLY_WHEN_USED = ("keras", "matplotlib", "ray", "sklearn", "tensorboardX", "tensorflow", "pytest")
ONLY_WHEN_USED += ("datasets", "fsspec", "grpc", "pyarrow", "safetensors", "tokenizers", "torch")


def violations(package: Path) -> list[str]:
    """Returns the imports of modules under `package` that break the rules above, as sentences."""
    modules = layers.modules_of(package)
    found: list[str | None] = []
    arrows: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        if _layer(name) is None:
            found.append(f"{name} has no layer: give its package a place in PACKAGES.")
            continue
        if (folder := _folder(name)) and folder not in FOLDERS.get(_package(name), ()):
            found.append(f"{name} has no layer: give {_package(name)}/{folder} a place in FOLDERS.")
        for imported, at_top in layers.imported_names(tree, name, package.name):
            if not _covers(package.name, imported):
                found.append(_outside(name, imported, at_top))
        for imported, _ in layers.imported_names(tree, name, package.name, types=True):
            if _covers(package.name, imported):
                other = layers.module_of(imported, package.name, modules)
                arrows[name] |= {other} - {name}
                found.append(_inside(name, other))
    return [*dict.fromkeys(filter(None, found)), *_cycles(arrows)]


def _inside(importer: str, imported: str) -> str | None:
    """Whether one module of the package may import another."""
    if importer == imported:
        return None
    high, low = _layer(importer), _layer(imported)
    if high is None or low is None:
        return None  # reported once, where the module itself is looked at
    if _package(importer) == _package(imported):
        if _package(importer) == "strategies" and importer not in OF_ALL_STRATEGIES:
            return f"{importer} imports {imported}: a strategy never imports another."
        above, below = _folder(importer), _folder(imported)
        order = FOLDERS.get(_package(importer), ())
        if above in order and below in order and order.index(above) < order.index(below):
            return f"{importer} imports {imported}: not from a layer below."
        return None
    return None if high > low else f"{importer} imports {imported}: not from a layer below."


def _cycles(arrows: dict[str, set[str]]) -> list[str]:
    """The cycles of imports: between files, and between a package's folders and other files."""
    folders: dict[str, set[str]] = {}
    for importer, imported in arrows.items():
        place = _place(importer)
        folders.setdefault(place, set()).update(set(map(_place, imported)) - {place})
    found = layers.cycles_of(arrows) + layers.cycles_of(folders)
    return [f"Imports make a cycle: {', '.join(cycle)}." for cycle in found]


def _place(name: str) -> str:
    """A file of a package, or the folder in it that the file is in."""
    return ".".join(name.split(".")[:2])


def _outside(importer: str, imported: str, at_top: bool) -> str | None:
    """Whether a module may import another library."""
    for library, allowed in ONLY_IN.items():
        if _covers(library, imported) and not {importer, importer.split(".")[0]} & set(allowed):
            places = f"only {', '.join(allowed)} may" if allowed else "nobody may"
            return f"{importer} imports {imported}: {places}."
    for library in ONLY_WHEN_USED:
        if _covers(library, imported) and at_top and not _loads_late(importer):
            return f"{importer} imports {imported} at the top: only where it is used."
    return None


def _loads_late(importer: str) -> bool:
    """Whether a module is loaded only where what it imports is there: pytest; Keras, in a scope."""
    always = ("keras.__init__", "keras.keras_scope", "keras.layout_map", "keras.model_state")
    return _package(importer) in ("pytest_plugin", "keras") and importer not in always


def _layer(name: str) -> int | None:
    """The number of a module's layer: that of its package."""
    for number, members in enumerate(PACKAGES):
        if _package(name) in members:
            return number
    return None


def _package(name: str) -> str:
    return name.split(".")[0]


def _folder(name: str) -> str:
    """The folder inside its package that a module is in; an empty string if it is in none."""
    parts = name.split(".")
    return parts[1] if len(parts) > 2 else ""


def _covers(library: str, imported: str) -> bool:
    return imported == library or imported.startswith(f"{library}.")


def test_imports_point_down():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("values/component.py", "from tpudist import strategy", "not from a layer below"),
        ("values/component.py", "from tpudist.strategy import Strategy", "not from a layer below"),
        ("values/component.py", "from ..strategy import Strategy", "not from a layer below"),
        (
            "values/component.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from tpudist.strategy import Strategy",
            "not from a layer below",
        ),
        ("values/component.py", "def f():\n    import tpudist.strategy", "not from a layer below"),
        ("values/component.py", "from tpudist import Strategy", "imports __init__"),
        ("errors.py", "from tpudist import reduce_op", "not from a layer below"),
        ("xla/mesh.py", "from .. import values", "not from a layer below"),
        ("xla/hlo/shapes.py", "from tpudist.xla.compiler import flags", "not from a layer below"),
        ("xla/compiler/flags.py", "from tpudist.xla.compiler import child", "cycle: xla.compiler"),
        (
            "xla/mesh.py",
            "from tpudist.xla.compiler import flags",
            "cycle: xla.compiler, xla.mesh",
        ),
        ("strategies/tpu.py", "from tpudist.strategies import one_device", "never imports another"),
        ("training/loop.py", "from tpudist.strategies import tpu", "not from a layer below"),
        (
            "values/component.py",
            "import jax.experimental.pallas",
            "only xla, programs, lowering may",
        ),
        ("values/component.py", "from jax import experimental", "only xla, programs, lowering may"),
        (
            "values/component.py",
            "import jax\nx = jax.extend.core",
            "only xla, programs, lowering may",
        ),
        ("values/component.py", "import jaxlib", "only xla, programs, lowering may"),
        ("xla/mesh.py", "from jax._src import core", "only xla.internals may"),
        ("xla/mesh.py", "import jax\nx = jax._src.core.Jaxpr", "only xla.internals may"),
        ("values/component.py", "from flax import nnx", "only state"),
        ("training/loop.py", "def f():\n    import ray", "only engine.ray.ray_session may"),
        ("training/loop.py", "import matplotlib.pyplot", "only where it is used"),
        ("utils.py", "", "has no layer"),
        ("xla/utils/text.py", "", "has no layer"),
    ],
)
def test_a_violation_is_found(tmp_path, file, source, complaint):
    found = violations(_write_package(tmp_path, {file: source}))
    assert any(complaint in line for line in found), found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "strategy/strategy.py",
            "from tpudist import values, options\nfrom tpudist.xla import mesh",
        ),
        ("xla/mesh.py", "from jax.experimental import topologies\nfrom . import hlo"),
        ("xla/mesh.py", "from tpudist.xla.hlo.shapes import Shape\nimport jaxlib"),
        ("strategies/__init__.py", "from tpudist.strategies.tpu import TPUStrategy"),
        ("__init__.py", "from tpudist import experimental\nfrom tpudist.strategies import tpu"),
        ("training/loop.py", "def f():\n    import matplotlib.pyplot"),
        ("values/component.py", "import jax\nx = jax.sharding.Mesh"),
    ],
)
def test_what_the_rules_allow_is_not_reported(tmp_path, file, source):
    assert violations(_write_package(tmp_path, {file: source})) == []


def _write_package(folder: Path, sources: dict[str, str]) -> Path:
    """A small package with a module in several layers, some with the given source."""
    files = ["__init__", "experimental", "options", "reduce_op", "strategy/__init__"]
    files += [
        "strategy/strategy",
        "values/__init__",
        "values/component",
        "xla/__init__",
        "xla/mesh",
    ]
    files += ["xla/hlo/__init__", "xla/hlo/shapes", "xla/compiler/__init__", "xla/compiler/flags"]
    files += ["strategies/__init__", "strategies/tpu", "strategies/one_device", "training/loop"]
    package = folder / "tpudist"
    first = {f"{name}.py": "" for name in files}
    first["xla/compiler/child.py"] = (
        "from tpudist.xla import mesh\nfrom tpudist.xla.compiler import flags"
    )
    for file, source in (first | sources).items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(source)
    return package
