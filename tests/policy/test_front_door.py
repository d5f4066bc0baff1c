"""README.md and docs/index.md: the quickstart prints what they show, and the diffs are real."""

import re

import numpy as np
import pytest

import doc_outputs
from places import ROOT
from policy.test_reference import hook

README = (ROOT / "README.md").read_text()
PAGES = hook("pages")
INDEX = PAGES.with_sections((ROOT / "docs" / "index.md").read_text(), "docs/index.md")
# What each diff was cut from: the program before, and the program after.
SOURCES = [
    ("docs/porting/custom_loop_before.py", "docs/porting/custom_loop_after.py"),
    ("docs/from_single_device_flax.md", "docs/from_single_device_flax.md"),
    ("docs/keras_fit.md", "docs/keras_fit.md"),
    ("docs/from_pmap.md", "docs/from_pmap.md"),
]


def diffs_of(text: str) -> list[list[str]]:
    """Returns the lines of each `diff` block."""
    found = re.findall(r"^( *)```diff\n(.*?)^ *```", text, re.M | re.S)
    return [[x.removeprefix(indent) for x in body.splitlines()] for indent, body in found]


def codes_of(line: str) -> set[str]:
    """Returns the code of a line, which may be a line of a diff."""
    return {line.strip(), line.strip()[1:].strip()}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_quickstart_prints_what_readme_shows_and_the_losses_of_one_device(tmp_path):
    [block] = doc_outputs.find_blocks(README)
    rows = "print([len(x) for x in strategy.experimental_local_results(batch['x'])])"
    printed, last_batch = doc_outputs.run_blocks([block.code, rows], tmp_path)
    assert last_batch == "[6, 6, 6, 6, 6, 6, 5, 0]\n"
    assert block.output is not None
    assert doc_outputs.find_difference(block.output, printed) is None, printed
    [alone] = doc_outputs.run_blocks(
        [block.code.replace("MirroredStrategy", "OneDeviceStrategy")], tmp_path
    )
    losses, expected = ([float(x) for x in re.findall(r"\d+\.\d+", y)] for y in (printed, alone))
    assert len(losses) == 10
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-2] < 0.02 * losses[0]


def test_readme_has_one_program_that_is_short():
    [block] = doc_outputs.find_blocks(README)
    assert len([x for x in block.code.splitlines() if x]) <= 27


@pytest.mark.parametrize("at", range(len(SOURCES)))
def test_each_line_of_a_diff_is_in_the_program_that_it_was_cut_from(at):
    diffs = diffs_of(INDEX)
    assert len(diffs) == len(SOURCES)
    before, after = (
        {code for line in (ROOT / path).read_text().splitlines() for code in codes_of(line)}
        for path in SOURCES[at]
    )
    assert len(diffs[at]) <= 20
    for line in diffs[at]:
        sign, code = line[0], line[1:].strip()
        assert sign == "+" or code in before, line
        assert sign == "-" or code in after, line


def test_readme_has_the_first_two_diffs_of_the_landing_page():
    assert diffs_of(README) == diffs_of(INDEX)[:2]


def test_readme_stays_short():
    text = re.sub(r"^```.*?^```|<!--.*?-->|<picture>.*?</picture>", "", README, flags=re.M | re.S)
    assert README.count("<picture>") + text.count("![") == 1
    assert len(re.findall(r"\]\(", text)) <= 14
    text = re.sub(r"\]\([^)]*\)|<a .*?</a>", "", text)
    text = re.sub(r"^\|.*", lambda row: re.sub(r"`[^`]*`", "", row[0]), text, flags=re.M)
    assert len(re.findall(r"\w[\w'.,%`-]*", text)) <= 450


def test_sections_of_readme_are_shown_with_links_and_both_pictures_of_the_site():
    assert "--8<--" not in INDEX
    assert "[Installation](installation.md)" in INDEX
    assert "(images/mesh-light.svg#only-light)\n![" in INDEX
    assert "(images/mesh-dark.svg#only-dark)" in INDEX
    assert "    From `tf.distribute`" in INDEX  # in a tab


def test_each_page_that_shows_another_file_exists():
    assert all((ROOT / "docs" / page).is_file() for page in PAGES.SHOWN_BY.values())
    assert all((ROOT / path).is_file() for path in PAGES.SHOWN_BY)
