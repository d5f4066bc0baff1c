"""The programs of docs/complete_programs.md print the same numbers before and after.

The guides show the diffs and the outputs of the programs.

What the programs for TensorFlow print is recorded; the marker `parity` runs them again.
"""

import importlib.util
import json
import re
import sys

import pytest

import doc_outputs

from . import porting, record

NAMES = sorted(porting.NUM_PROCESSES)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", NAMES)
def test_the_ported_program_prints_the_numbers_of_the_original(name, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")  # a ported program runs without a warning
    # Sums are taken in another order, and Adam's epsilon enters in another place.
    assert porting.close(porting.run(name, "after"), porting.recorded(name), rel_tol=1e-4)


def blocks_of(language):
    """Each block of a language in the guides, with the program of the section it is in."""
    sections = [
        x for guide in porting.GUIDES for x in re.split(r"^## ", guide.read_text(), flags=re.M)
    ]
    names = {"custom loop": "custom_loop", "synchronous": "batch_norm", "several": "multi_worker"}
    for section in sections:
        found = re.match(r"Program \d: (?:a )?(custom loop|synchronous|several)", section)
        name = names[found[1]] if found else "custom_loop"  # the first page shows this program
        for block in re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S):
            if found or language == "diff":
                yield name, block


def are_in_order(lines, program):
    rest = iter(program.splitlines())
    return all(line in rest for line in lines if line)


def test_the_guides_show_the_diffs_of_the_programs():
    diffs = list(blocks_of("diff"))
    assert [name for name, _ in diffs] == [
        "custom_loop",
        "custom_loop",
        "batch_norm",
        "multi_worker",
    ]
    for name, diff in diffs:
        for side, sign in (("before", "-"), ("after", "+")):
            lines = [line[1:] for line in diff.splitlines() if line[:1] in {sign, " "}]
            program = (porting.PROGRAMS / f"{name}_{side}.py").read_text()
            assert are_in_order(lines, program), (name, side)


@pytest.mark.parametrize("page", ["from_jit", "from_pmap", "linen_haiku_equinox"])
def test_what_a_diff_adds_is_in_the_code_of_its_page(page):
    text = (porting.ROOT / "docs" / f"{page}.md").read_text()
    [diff] = re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)
    code = [line for block in doc_outputs.find_blocks(text) for line in block.code.splitlines()]
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert added
    assert set(added) <= set(code)


def test_the_guides_show_the_outputs_of_the_programs():
    outputs = list(blocks_of("text"))
    assert [name for name, _ in outputs] == ["custom_loop", "batch_norm", "multi_worker"]
    for name, output in outputs:
        printed = " ".join(json.dumps(x) for x in porting.recorded(name))
        stored = " ".join(output.split())
        assert doc_outputs.find_difference(stored, printed) is None


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
