"""The public names: tf.distribute's, where tf.distribute has them, and each explained.

`data/surface.json` lists every name of tf.distribute (of TensorFlow 2.21 and of the r1.15 pages),
under the place where tpudist mirrors it. `tf.distribute`'s Mirrored values are not listed: here
they are plain arrays.
"""

import ast
import importlib
import inspect
import json
import subprocess
import sys
import textwrap
import types
from typing import Any

import pytest

import tpudist
from parity import signatures
from places import DATA, PACKAGE

SURFACE_FILE = DATA / "surface.json"
SURFACE: dict[str, list[str]] = json.loads(SURFACE_FILE.read_text())["surface"]


def is_offered(dotted: str) -> bool:
    """Whether `tpudist.A.b` can be reached: an attribute of `A` or of its objects."""
    owner: Any = tpudist
    *owners, last = dotted.split(".")[1:]
    for name in owners:
        owner = getattr(owner, name, None)
    return hasattr(owner, last) or last in _attributes_of_objects(owner)


def _attributes_of_objects(owner: Any) -> set[str]:
    """Returns the names that a class annotates, or assigns to `self` in its constructor."""
    names: set[str] = set()
    for cls in inspect.getmro(owner)[:-1] if inspect.isclass(owner) else ():
        names |= inspect.get_annotations(cls).keys()
        if isinstance(init := vars(cls).get("__init__"), types.FunctionType):
            names |= _assigned_to_self(init)
    return names


def _assigned_to_self(init: types.FunctionType) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
    except OSError:  # written by `dataclass`, from the annotations
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _all_names() -> list[str]:
    return [f"{owner}.{name}" for owner, names in SURFACE.items() for name in names]


def test_every_name_of_tf_distribute_is_offered():
    assert [name for name in _all_names() if not is_offered(name)] == []


def test_a_missing_name_and_a_missing_owner_are_not_offered():
    assert is_offered("tpudist.Strategy.run")
    assert not is_offered("tpudist.Strategy.no_such_method")
    assert not is_offered("tpudist.NoSuchClass.run")


def test_an_attribute_that_every_object_gets_is_offered():
    class Owner:
        annotated: int

        def __init__(self):
            self.assigned, other = 1, 2
            self.read.only = other

    assert _attributes_of_objects(Owner) == {"annotated", "assigned"}


def _homes() -> dict[str, str]:
    """The module of each public name that the stub lists; "" for a package."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    return {
        alias.name: node.module or ""
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize(("name", "home"), _homes().items())
def test_a_public_name_comes_from_the_module_that_the_stub_names(name, home):
    assert name in tpudist.__all__
    module = importlib.import_module(f"tpudist.{home or name}")
    assert getattr(tpudist, name) is (getattr(module, name) if home else module)
    assert vars(tpudist)[name] is getattr(tpudist, name), "it is looked up once"


def test_a_missing_name_raises_an_error_with_the_name():
    with pytest.raises(AttributeError, match="'tpudist' has no attribute 'MirorredStrategy'") as e:
        tpudist.MirorredStrategy  # noqa: B018
    assert e.value.obj is tpudist
    assert not hasattr(tpudist, "_private")
    with pytest.raises(ImportError, match="cannot import name 'Strategie'"):
        exec("from tpudist import Strategie")


def test_packages_need_no_import_of_their_own():
    assert tpudist.input is importlib.import_module("tpudist.input")


THEIRS = json.loads(signatures.RECORDED.read_text())["signatures"]


# Constructors that users do not call: strategies create these objects, or take a mesh.
MADE_BY_US = {
    "tpudist.DistributedDataset",
    "tpudist.DistributedIterator",
    "tpudist.PerReplica",
    "tpudist.Strategy",
    "tpudist.StrategyExtended",
    "tpudist.compat.v1.Strategy",
    "tpudist.compat.v1.StrategyExtended",
}


@pytest.mark.parametrize("dotted", sorted(THEIRS.keys() - MADE_BY_US))
def test_a_signature_is_compatible_with_tensorflows(dotted):
    """Calls written for tf.distribute work: no parameter is renamed, moved, or newly required."""
    owner: Any = tpudist
    for name in dotted.split(".")[1:]:
        if not hasattr(owner, name):
            assert not is_offered(dotted)
            return
        owner = (
            inspect.getattr_static(owner, name) if inspect.isclass(owner) else getattr(owner, name)
        )
    ours = signatures.of(owner)
    assert ours is not None, f"{dotted} cannot be called"
    assert signatures.violations(ours, THEIRS[dotted]) == [], f"ours: {ours}"


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        (["a", "b="], ["a", "b="], []),
        (["a=", "b=", "*", "c="], ["a", "b="], []),
        (
            ["b", "a"],
            ["a", "b"],
            ["a is not parameter 0 (b is there)", "b is not parameter 1 (a is there)"],
        ),
        (["a", "b"], ["a", "b="], ["b has no default"]),
        (["a", "b="], ["a"], ["b is ours and not keyword-only"]),
        (["a", "*", "b"], ["a"], ["b is ours and has no default"]),
        (["a"], ["a", "*", "b="], ["keyword b= is missing, or has no default"]),
        (["*args", "b="], ["*args", "**kwargs"], []),
        ([], ["a"], ["a is not parameter 0"]),
    ],
)
def test_an_incompatible_signature_is_found(ours, theirs, found):
    assert signatures.violations(ours, theirs) == found


def test_a_signature_says_names_defaults_and_kinds():
    class Owner:
        def __init__(self, a, b=1, *, c, d=2, **rest):
            pass

        @staticmethod
        def static(a, *more):
            pass

        @classmethod
        def made(cls, a=1):
            pass

        attribute = 3

    assert signatures.of(Owner) == ["a", "b=", "*", "c", "d=", "**rest"]
    assert signatures.of(inspect.getattr_static(Owner, "static")) == ["a", "*more"]
    assert signatures.of(inspect.getattr_static(Owner, "made")) == ["a="]
    assert signatures.of(Owner.attribute) is None


def _modules() -> list[types.ModuleType]:
    """tpudist and the modules that it offers, such as `tpudist.experimental`."""
    offered = (getattr(tpudist, name) for name in tpudist.__all__)
    return [tpudist, *(value for value in offered if isinstance(value, types.ModuleType))]


def _undocumented(module: types.ModuleType) -> list[str]:
    """Classes, functions, and methods of classes without a docstring of their own."""
    missing = [] if module.__doc__ else [module.__name__]
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            written = value.__doc__ and not value.__doc__.startswith(f"{name}(")  # by dataclass
            missing += [] if written else [f"{module.__name__}.{name}"]
            missing += [f"{module.__name__}.{name}.{m}" for m in _silent_methods(value)]
        elif callable(value) and not inspect.getdoc(value):
            missing.append(f"{module.__name__}.{name}")
    return missing


def _silent_methods(cls: type) -> list[str]:
    """Public methods and properties that neither the class nor a base of it explains."""
    return [
        name
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and isinstance(member, types.FunctionType | property | classmethod | staticmethod)
        and not inspect.getdoc(getattr(cls, name))
    ]


def test_every_public_name_is_documented():
    assert [name for module in _modules() for name in _undocumented(module)] == []


def test_what_lacks_a_docstring_is_found():
    class Silent:
        def run(self):
            pass

        def _private(self):
            pass

    Silent.__doc__ = None
    module = types.ModuleType("silent")
    module.Silent = Silent
    module.__all__ = ["Silent"]
    assert _undocumented(module) == ["silent", "silent.Silent", "silent.Silent.run"]


def others(modules: list[str]) -> set[str]:
    """The libraries of loaded modules, except Python's and tpudist."""
    first = {name.partition(".")[0] for name in modules}
    return first - sys.stdlib_module_names - {"tpudist", "__main__"}


def test_importing_tpudist_loads_no_other_library_but_the_lazy_loader():
    """It costs next to nothing in addition to the program's imports of JAX, Flax and Optax."""
    nothing = modules_after("import sys")
    assert others(modules_after("import tpudist")) - others(nothing) == {"lazy_loader"}


@pytest.mark.slow
def test_all_public_names_together_load_jax_flax_and_optax_alone(modules_after_use):
    """Nothing for the terminal, for data, checkpoints or processes, before they are used.

    Flax loads rich itself, for notebooks; so the test looks at the modules of tpudist that use it.
    """
    base = modules_after("import jax, lazy_loader, optax; from flax import nnx")
    assert others(modules_after_use) - others(base) == set()
    assert {"grain", "orbax", "tyro"} & others(modules_after_use) == set()
    used = [x for x in modules_after_use if x.startswith("tpudist.")]
    assert [x for x in used if x.startswith(("tpudist.cli", "tpudist.planner.show.terminal"))] == []


def test_public_names_start_no_backend_and_change_no_setting(modules_after_use):
    """A program must still be able to call `emulate` and to change settings."""
    assert "tpudist.strategies.mirrored" in modules_after_use


@pytest.fixture(scope="module")
def modules_after_use() -> list[str]:
    return modules_after(
        """
import jax
before = dict(jax.config.values)
import tpudist
for name in tpudist.__all__:
    getattr(tpudist, name)
assert before == dict(jax.config.values), "a setting changed"
jax.config.update("jax_num_cpu_devices", 2)  # refused once a backend has started
"""
    )


def modules_after(program: str) -> list[str]:
    """The modules that are loaded after a program of a fresh process."""
    program += "\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
