"""The page of callbacks and features says what becomes of each; a share is trained here."""

import warnings

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import keras_rows_page as page
from keras_cases import CALLBACKS, FEATURES, STRATEGIES, compare, run

CASES = {**CALLBACKS, **FEATURES}


def test_the_page_has_a_cell_for_each():
    text = page.PAGE.read_text()
    cells = page.read_table(text)
    assert list(cells) == [(name, strategy) for name in CASES for strategy in STRATEGIES]
    assert set(cells.values()) == {"equal"}
    assert page.with_table(text, cells) == text
    assert len(CALLBACKS) >= 20
    assert len(FEATURES) >= 12


@pytest.fixture
def programs_on_disk(tmp_path):
    """Most callbacks train the same model: it is compiled once for each strategy."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [(name, getattr(jax.config, name)) for name in names]
    for name, value in zip(names, (str(tmp_path), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before:
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_the_page_says_what_becomes_of_them(programs_on_disk):
    """Of each under one strategy; all take keras_rows_page.py minutes."""
    cells = page.read_table(page.PAGE.read_text())
    strategies = {name: make() for name, make in STRATEGIES.items()}
    chosen = [
        (name, strategy)
        for i, name in enumerate(CASES)
        for j, strategy in enumerate(STRATEGIES)
        if j == i % len(STRATEGIES)
    ]
    assert [name for name, _ in chosen] == list(CASES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            (name, where): compare(name, strategies[where], run(CASES[name]))
            for name, where in chosen
        }
    assert found == {cell: cells[cell] for cell in chosen}
