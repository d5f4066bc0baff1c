"""The programs of docs/porting.md print the same numbers before and after, and stand in the guide.

What the programs for TensorFlow print is recorded; the marker `parity` runs them again.
"""

import importlib.util
import re
import subprocess
import sys

import pytest

from . import porting, record

NAMES = sorted(porting.NUM_PROCESSES)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", NAMES)
def test_the_ported_program_prints_the_numbers_of_the_original(name, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")  # a ported program runs without a warning
    # Sums are taken in another order, and Adam's epsilon enters in another place.
    assert porting.close(porting.run(name, "after"), porting.recorded(name), rel_tol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["before", "after"])
def test_the_guide_shows_the_program_that_is_run(name, side):
    program = (porting.PROGRAMS / f"{name}_{side}.py").read_text()
    assert f"```python\n{program}```" in porting.GUIDE.read_text()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_snippets_of_the_guide_run_one_after_the_other():
    programs = {path.read_text() for path in porting.PROGRAMS.glob("*.py")}
    blocks = re.findall(r"^```python\n(.*?)^```", porting.GUIDE.read_text(), re.M | re.S)
    snippets = [block for block in blocks if block not in programs]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(snippets)],
        cwd=porting.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([{"x": [1.0, 2.0]}], [{"x": [1.0, 2.00001]}], True),
        ([1.0], [1.001], False),
        ([1.0], [1.0, 1.0], False),
        ({"x": 1.0}, {"y": 1.0}, False),
        (1, 1.0, False),
    ],
)
def test_results_are_close_if_structure_and_numbers_are(a, b, expected):
    assert porting.close(a, b, rel_tol=1e-4) == expected


@pytest.mark.parity
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_what_the_original_prints(name, monkeypatch):
    if record.PYTHON == sys.executable and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed: pip install 'tpudist[parity]'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert porting.close(porting.run(name, "before"), porting.recorded(name), rel_tol=1e-5)
