"""Programs that are installed as packages count as user code, not as libraries."""

import importlib
import sys

import jax
import numpy as np
import pytest

import tpudist
from tpudist.state import library_code
from tpudist.xla import program_packages, user_code

MODULE = """
SCALE = 2.0


def step(x):
    return SCALE * x.sum()


def step_of_real_rows(x):
    if not x.shape[0]:
        raise ValueError("no rows here")
    return x.sum()
"""


@pytest.fixture(params=["site-packages"])
def install(request, tmp_path, monkeypatch):
    """Returns a function that installs a module with its requirements, as pip does."""
    folder = tmp_path / request.param
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def install(name, *requirements):
        (folder / f"{name}.py").write_text(MODULE)
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        lines += [f"Requires-Dist: {x}" for x in requirements]
        (info / "METADATA").write_text("\n".join(lines))
        (info / "RECORD").write_text(f"{name}.py,,\n{name}-1.0.dist-info/METADATA,,\n")
        for cached in (
            program_packages.is_library_file,
            program_packages.has_file,
            program_packages._find_names,
        ):
            cached.cache_clear()
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield install
    for name in [x for x in sys.modules if x.startswith("installed_")]:
        del sys.modules[name]


@pytest.mark.parametrize("requirement", ["tpudist", "tpudist>=0.1", "tpudist[keras]; extra == 'x'"])
def test_an_installed_program_sees_changes_of_its_globals(install, requirement):
    module = install("installed_program", "numpy", requirement)
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    batch = strategy.distribute_batch(np.ones(8, np.float32))
    for scale in (2.0, 3.0):
        module.SCALE = scale
        total = strategy.reduce("sum", strategy.run(module.step, (batch,)), axis=None)
        assert float(total) == 8 * scale


@pytest.mark.parametrize("install", ["site-packages", "dist-packages"], indirect=True)
def test_a_package_in_any_folder_of_packages_is_a_library_unless_it_requires_tpudist(install):
    """Such as in the user's home directory, where pip installs by default without root rights."""
    library = install("installed_library", "jax")
    assert library_code.is_library_module(library)
    assert library_code.is_library_code(library.step.__code__)
    assert user_code.is_other_library(library.__file__)
    program = install("installed_program", "tpudist")
    assert not library_code.is_library_module(program)
    assert not library_code.is_library_code(program.step.__code__)
    assert not user_code.is_other_library(program.__file__)


def test_an_error_of_an_installed_program_for_zero_rows_is_raised(install):
    """The error of a library is not raised; the library's program for more rows is used."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    tail = strategy.distribute_batch(np.ones(1, np.float32), global_batch_size=8)
    program = install("installed_program", "tpudist")
    with pytest.raises(ValueError, match="with 0 rows the function cannot be traced: no rows here"):
        strategy.run(program.step_of_real_rows, (tail,))
    library = install("installed_library", "jax", "tpudist-like")
    np.testing.assert_array_equal(strategy.run(library.step_of_real_rows, (tail,)).array, [1, 0])
