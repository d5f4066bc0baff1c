"""The figures of the house: they are counted rightly, and do not creep."""

import house
from places import ROOT


def test_circles_and_floors_of_small_houses():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set()}
    assert house.circles_of(arrows) == [["b", "c"]]
    floors = house.floors_of({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    assert floors == {"c": 1, "b": 2, "a": 3}


def test_imports_are_found_where_they_are_and_not_where_types_are_named(tmp_path):
    package = tmp_path / "tpudist"
    (package / "low").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tpudist.high import Name\n"
    )
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
    modules = house.modules_of(package)
    imports = house.imports_of(modules, "tpudist")
    assert imports["high"] == {"low.deep"}
    assert imports["later"] == {"low.__init__"}
    assert imports["__init__"] == {"high"}
    rooms = house.rooms_of(imports)
    assert rooms == {"__init__": {"high"}, "high": {"low"}, "later": {"low"}, "low": set()}
    assert house.share_of_any(modules) == 50
    assert house.share_of_comments(package) == 100 / 12


def test_the_house_has_few_rooms_few_arrows_and_no_circles():
    """Raise a bound only with a reason: a room more is a concept more."""
    found = house.figures(ROOT)
    assert found["circles of rooms"] == []
    assert found["circles of modules"] == []
    # The packages of docs/architecture.md, and one more.
    assert found["rooms (entries at the top)"] <= 40
    assert found["floors"] <= 17
    # Of the 741 pairs of 39 packages.
    assert found["arrows between rooms"] <= 225


def test_the_picture_of_the_floors_is_that_of_the_imports():
    """`python scripts/house.py --draw docs/images/house.svg` draws it."""
    assert (ROOT / "docs" / "images" / "house.svg").read_text() == house.draw(ROOT)
