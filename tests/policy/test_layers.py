"""The figures of `scripts/layers.py` are counted rightly, and the package stays within bounds."""

import layers
from places import ROOT


def test_cycles_and_layers_of_small_packages():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set()}
    assert layers.cycles_of(imports) == [["b", "c"]]
    found = layers.layers_of({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    assert found == {"c": 1, "b": 2, "a": 3}


def test_imports_are_found_and_those_for_types_on_request(tmp_path):
    package = tmp_path / "tpudist"
    (package / "low").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__init__.pyi").write_text("from .high import Name as Name\n")
    (package / "low" / "__init__.py").write_text("")
    (package / "low" / "deep.py").write_text("# One.\nvalue: int = 1\n")
    (package / "high.py").write_text(
        "from typing import TYPE_CHECKING, Any\n"
        "if TYPE_CHECKING:\n"
        "    import tpudist.later\n"
        "def f(x: Any, y: int):\n"
        "    from tpudist.low.deep import value\n"
        "Name = 1\n"
    )
    (package / "later.py").write_text("from tpudist import low\n")
    modules = layers.modules_of(package)
    imports = layers.imports_of(modules, "tpudist")
    assert imports["high"] == {"low.deep"}
    assert imports["later"] == {"low.__init__"}
    assert imports["__init__"] == {"high"}
    with_types = layers.imports_of(modules, "tpudist", types=True)
    assert with_types["high"] == {"low.deep", "later"}
    packages = layers.packages_of(imports)
    assert packages == {"__init__": {"high"}, "high": {"low"}, "later": {"low"}, "low": set()}
    assert layers.share_of_any(modules) == 50
    assert layers.share_of_comments(package) == 100 / 9


def test_tpudist_has_few_packages_few_imports_and_no_cycles():
    """Raise a bound only with a reason: one more package is one more concept."""
    found = layers.figures(ROOT)
    assert found["cycles of packages"] == []
    assert found["cycles of modules"] == []
    assert found["packages (entries at the top)"] <= 42
    # The planner asks `keras` for the program of `fit`, which is one import and one layer more.
    assert found["layers"] <= 18
    # Messages shorten text and name processes and replicas with `options`, checkpoints open objects
    # of libraries, nine packages draw their tables with `display`, and the planner reads traces of
    # the profiler, which are protocol buffers.
    assert found["imports between packages"] <= 261  # of the 861 pairs of 42 packages
    assert int(found["files in the largest folder"].split()[0]) <= 25
