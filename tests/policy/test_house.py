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
    # 28, and `protobuf_wire`: of no concept of tpudist's, and read by rooms that do not know each
    # other (topologies in `cluster_resolver`, examples in `input`). And `supervisor`: processes
    # seen from outside, which must work though nothing of a run does. And `engine`, `ps` and
    # `coordinator`: functions on workers, and what they change, which no synchronous step knows.
    # And `keras`: another library's loop under the scope, which a strategy enters.
    # And `port`: programs as text, which `cli` alone asks for.
    assert found["rooms (entries at the top)"] <= 35
    assert found["floors"] <= 13
    # 138 for the house as it was planned; `supervisor` reads what `xla/goodput.py` notes, and where
    # the hosts of a slice are; `coordinator` and `ps` stand on eleven rooms together, as Variables
    # on servers are Variables, are read in traces and are held by a strategy; `models` asks
    # `context` for the strategy that says where weights of others are read to; `training` runs any
    # step over any data: it distributes them, and refuses metrics that differ between replicas;
    # `keras` asks where it is, places batches, reads distributed datasets, is entered by a scope,
    # and its variables are Variables of the strategy (`state`) by the rules of `reduce_op`
    # where steps assign them; `cli` asks over which axes the rules split anything.
    assert found["arrows between rooms"] <= 171


def test_the_picture_of_the_floors_is_that_of_the_imports():
    """`python scripts/house.py --draw docs/images/house.svg` draws it."""
    assert (ROOT / "docs" / "images" / "house.svg").read_text() == house.draw(ROOT)
