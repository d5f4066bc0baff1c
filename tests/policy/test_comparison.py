"""The comparison with other libraries says what its programs give."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import comparison, uneven_epochs
from places import ROOT

PAGE = (ROOT / "docs" / "comparison.md").read_text()
NAMES = {
    "tpudist": "tpudist",
    "jax": "plain JAX, padded and masked by hand",
    "keras": "Keras, `DataParallel` and `fit`",
    "accelerate": "Accelerate, as it comes (`even_batches=True`)",
    "fabric": "Fabric, as it comes (`DistributedSampler`)",
}


@pytest.mark.parametrize("library", NAMES)
def test_each_program_has_as_many_lines_as_the_page_says(library):
    (row,) = re.findall(rf"^\| {re.escape(NAMES[library])} \|.* (\d+) \|$", PAGE, re.M)
    assert comparison.lines_of(uneven_epochs.LIBRARIES[library]) == int(row)


def test_lines_are_counted_without_imports_and_by_what_they_say():
    def function(x):
        import math

        y = [
            x,
            math.pi,
        ]

        return y

    assert comparison.lines_of(function) == 2


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("library", ["tpudist", "jax"])
def test_a_partial_batch_is_exact(library):
    found = comparison.ask(Path(sys.executable), library)
    np.testing.assert_allclose(
        found["weights"], uneven_epochs.weights_of_one_device(), rtol=0, atol=1e-7
    )


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
def test_keras_refuses_the_partial_batch():
    found = comparison.ask(Path(sys.executable), "keras")
    assert re.search("(dimension size is|it is equal to) 36", found["refused"])


def test_a_program_that_fails_is_an_error_that_shows_what_it_wrote():
    with pytest.raises(RuntimeError, match=r"theirs ended with 1:\n(.*\n)*KeyError: 'theirs'"):
        comparison.ask(Path(sys.executable), "theirs")
