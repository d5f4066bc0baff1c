"""The documented table of callbacks and features; each run trains a part of its cells."""

import functools

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import keras_rows_page as page
from keras_cases import CALLBACKS, FEATURES, STRATEGIES, compare, run

CASES = {**CALLBACKS, **FEATURES}
# Every run trains these, because tpudist/keras has a different hook for each of them.
CORE = {
    "ModelCheckpoint, weights",
    "custom callback that reads weights during an epoch",
    "PyDataset",
    "multiple inputs and outputs, loss_weights",
    "custom train_step, add_loss, regularizers",
}


def test_the_page_has_a_cell_for_each_case_and_strategy():
    text = page.PAGE.read_text()
    cells = page.read_table(text)
    assert list(cells) == [(name, strategy) for name in CASES for strategy in STRATEGIES]
    assert set(cells.values()) == {"equal"}
    assert page.with_table(text, cells) == text
    assert set(CASES) > CORE
    assert len(CALLBACKS) >= 20
    assert len(FEATURES) >= 12


def test_the_page_lists_each_exception():
    text = page.PAGE.read_text()
    cells = page.read_table(text) | {("History", "Mirrored"): "ValueError: no"}
    new = page.with_table(text, cells)
    assert "179 of 180" in new
    assert "| History | Mirrored | ValueError: no |" in new


@pytest.fixture(scope="module")
def programs_on_disk(tmp_path_factory):
    """Most callbacks train the same model, so it is compiled once per strategy."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [(name, getattr(jax.config, name)) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("programs")), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before:
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@functools.cache
def make_strategy(name):
    return STRATEGIES[name]()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in CORE else pytest.mark.exhaustive) for x in CASES]
)
def test_the_page_states_the_result_of_each_case(name, programs_on_disk):
    """Covers one strategy; keras_rows_page.py trains all cells, which takes minutes."""
    where = list(STRATEGIES)[list(CASES).index(name) % len(STRATEGIES)]
    cells = page.read_table(page.PAGE.read_text())
    assert compare(name, make_strategy(where), run(CASES[name])) == cells[name, where]
