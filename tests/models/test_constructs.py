"""Every model construct on every mesh matches one device or raises a clear error.

The cells run in separate processes, because a failure can crash the process.
"""

import jax
import pytest

import construct_cells
import constructs_page
from construct_cells import GEOMETRIES
from constructs import CONSTRUCTS
from tpudist.lowering import compile
from tpudist.lowering.workarounds import known_operations
from tpudist.programs import jaxprs

SEVERAL_AXES = ("fsdp=2, tensor=2", "data=2, fsdp=2", "fsdp=4, tensor=2")
# XLA's partitioner crashed the process on these, on a CPU or a TPU.
AT_RISK = (
    "nnx.Embed",
    "embedding, annotated",
    "cross-entropy by index",
    "tied embeddings",
    "experts, by one-hot",
    "experts, by index",
    "lax.scan of layers, remat",
    "lookups in cond and while_loop",
)


def what_became_of(names, geometries, slice_name=""):
    cells = [(name, geometry) for name in names for geometry in geometries]
    found = construct_cells.run_cells(cells, slice_name)
    assert set(found) == set(cells)
    return found


@pytest.mark.slow
def test_lookups_in_replicas_of_several_axes_match_one_device():
    names = ("nnx.Embed", "cross-entropy by index", "experts, by index")
    found = what_became_of(names, SEVERAL_AXES[:1])
    assert set(found.values()) == {"exact"}, found


def some_cells(geometry):
    """Returns a quarter of the constructs, and those at risk if there are several axes."""
    j = list(GEOMETRIES).index(geometry)
    return [
        (name, geometry)
        for i, name in enumerate(CONSTRUCTS)
        if (i + j) % 4 == 0 or (name in AT_RISK and geometry in SEVERAL_AXES)
    ]


def test_each_construct_is_covered_by_a_geometry():
    assert {name for x in GEOMETRIES for name, _ in some_cells(x)} == set(CONSTRUCTS)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_page_of_constructs_states_each_result(geometry):
    """Covers each construct on 2 or 3 geometries; constructs_page.py takes minutes for all."""
    cells = some_cells(geometry)
    found = construct_cells.run_cells(cells)
    told = constructs_page.read_table(constructs_page.PAGE.read_text())
    kinds = {cell: x.partition(":")[0] for cell, x in found.items()}
    assert kinds == {cell: told[cell] for cell in cells}, found


def test_the_page_of_constructs_has_a_cell_for_each_construct():
    page = constructs_page.PAGE.read_text()
    told = constructs_page.read_table(page)
    assert list(told) == [(name, geometry) for name in CONSTRUCTS for geometry in GEOMETRIES]
    assert set(told.values()) <= {"exact", "refused"}
    assert constructs_page.with_table(page, told) == page


def test_the_page_of_constructs_lists_each_exception():
    page = constructs_page.PAGE.read_text()
    told = constructs_page.read_table(page) | {("FFT", "mirrored"): "refused: no"}
    new = constructs_page.with_table(page, told)
    assert "404 of 405" in new
    assert "| FFT | mirrored | refused: no |" in new


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # `sow` is deprecated
def test_the_constructs_cover_the_known_operations(monkeypatch):
    """An operation that no construct covers is first compiled in a separate process."""
    found = set()
    spread = compile.spread

    def note(program, *args, **kwargs):
        found.update(eqn.primitive.name for eqn in jaxprs.walk(program.closed))
        return spread(program, *args, **kwargs)

    monkeypatch.setattr(compile, "spread", note)
    for name, construct in CONSTRUCTS.items():
        strategy = construct_cells.strategy_of(SEVERAL_AXES[0])
        model = strategy.create_abstract(construct.make)
        (batch,) = strategy.experimental_distribute_dataset([construct_cells.batch_of()])
        strategy.lower(construct_cells.step(name), args=(model, batch))
    assert found <= known_operations.KNOWN
    if jax.__version_info__ >= (0, 12):  # the oldest jax has other operations instead
        assert len(known_operations.KNOWN - found) < 5


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.parametrize("geometry", SEVERAL_AXES)
def test_the_tpu_compiler_accepts_the_constructs_at_risk(geometry):
    found = what_became_of(AT_RISK, [geometry], "v5e:2x4")
    assert set(found.values()) == {"compiled"}, found


def test_a_crashed_process_fails_only_its_own_cell(tmp_path):
    """Otherwise an XLA bug would hide the results of all later cells."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys\n"
        "for name, geometry in json.load(sys.stdin):\n"
        "    if name == 'FFT':\n"
        "        os.write(2, b'F1123 Check failed: a > b')\n"
        "        os.abort()\n"
        "    print(json.dumps([name, geometry, 'exact']), flush=True)\n"
    )
    cells = [(name, "mirrored") for name in ("LoRA", "FFT", "nnx.Embed")]
    found = construct_cells.run_cells(cells, program=str(program))
    assert list(found.values()) == ["exact", "aborted: F1123 Check failed: a > b", "exact"]
