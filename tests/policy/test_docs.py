"""The Python blocks of each page of docs run one after the other, and print what the page shows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import doc_outputs
from places import ROOT
from processes import run_processes
from tpudist.context import ContextKind
from tpudist.context.strategy_base import VariableHome


def path_of(page: str) -> str:
    """The file of a page of docs, or of a README of a package."""
    return f"{page}.md" if page.startswith("tpudist/") else f"docs/{page}.md"


def blocks_of(page: str, section: str | None = None) -> list[doc_outputs.Block]:
    """The Python blocks of a page.

    Of a page whose sections stand by themselves, those of one section, after the ones before all.
    """
    text = (ROOT / path_of(page)).read_text()
    if section is not None:
        first, *sections = re.split(r"^## ", text, flags=re.M)
        [found] = [x for x in sections if x.startswith(section + "\n")]
        text = first + found
    return doc_outputs.find_blocks(text)


def check(page: str, folder: Path, section: str | None = None) -> None:
    """Runs the blocks of a page, or of a section, and compares what each prints."""
    blocks = blocks_of(page, section)
    printed = doc_outputs.run_blocks([x.code for x in blocks], folder)
    for block, output in zip(blocks, printed, strict=True):
        difference = doc_outputs.find_difference(block.output or "", output)
        remedy = f"python scripts/doc_outputs.py {path_of(page)} stores the new output"
        assert difference is None, f"{block.code}\n{difference}\n{remedy}"


COMMANDS = ("fault_injection", "fault_tolerance", "reference/command_line", "several_processes")
# Pages with a test of their own.
OTHERS = {"gpus", "linen_haiku_equinox", *COMMANDS}
PAGES = sorted(
    page
    for folder in ("", "reference/")
    for x in (ROOT / "docs" / folder).glob("*.md")
    if (page := folder + x.stem) not in OTHERS and doc_outputs.find_blocks(x.read_text())
)
PAGES += sorted(
    x.relative_to(ROOT).with_suffix("").as_posix() for x in (ROOT / "tpudist").rglob("README.md")
)
MARKS = {"planning": [pytest.mark.libtpu]}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("page", [pytest.param(x, marks=MARKS.get(x, ())) for x in PAGES])
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(page, tmp_path):
    check(page, tmp_path)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_of_a_page_print_what_the_page_shows(page, tmp_path):
    """Processes print at the same time, so the order of lines is not compared."""
    for block in blocks_of(page):
        (tmp_path / block.code.splitlines()[0].removeprefix("# ")).write_text(block.code)
    for name, arguments in (("python", ""), ("tpudist", "-m tpudist ")):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        command.chmod(0o755)
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    env["PATH"] = f"{tmp_path}/bin:{env['PATH']}"
    text = (ROOT / "docs" / f"{page}.md").read_text()
    shown = re.findall(r"^```bash\n([^`]*)```\n\n```text\n([^`]*)```$", text, re.M)
    assert shown
    for command, output in shown:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        printed = done.stdout.splitlines()
        for line in output.splitlines():
            found = any(doc_outputs.find_difference(line, x) is None for x in printed)
            assert found or line == "...", f"{command}does not print {line!r}:\n{done.stdout}"


def test_there_are_pages_with_code():
    assert len(PAGES) >= 15


@pytest.mark.parametrize(
    ("stored", "printed", "same"),
    [
        ("loss 0.5 (3 steps)", "loss 0.502 (3 steps)", True),
        ("loss 0.5 (3 steps)", "loss 0.52 (3 steps)", False),
        ("loss 0.5 (3 steps)", "loss 0.5 (4 steps)", False),
        ("took ... s, x 1.0", "took 12 s, x 1.001", True),
        ("took ... s, x 1.0", "took 12 s, x 1.1", False),
        ("[1. 2. -3.5e-01]", "[1.  2. -3.51e-01]", True),
        ("a\n...\nb 1.0", "a\nx\ny\nb 1.001\n", True),
        ("a\n...\nb 1.0", "a\nx\ny\nb 1.1\n", False),
        ("a", "a\nb", False),
        ("a\nb", "a", False),
        ("", "a", False),
    ],
)
def test_outputs_match_up_to_rounding_and_ellipses(stored, printed, same):
    assert (doc_outputs.find_difference(stored, printed) is None) == same


def test_an_output_is_the_text_block_right_below():
    page = "```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\n2\n```\nx\n```text\n3\n```\n"
    assert [x.output for x in doc_outputs.find_blocks(page)] == ["1\n", None]


def test_stored_outputs_are_rewritten_where_they_are_out_of_date(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "a\n```python\nprint(1.0)\n```\nb\n```python\nprint(2)\n```\n\n```text\n3\n```\n"
    )
    assert doc_outputs.update(page) == 2
    blocks = doc_outputs.find_blocks(page.read_text())
    assert [x.output for x in blocks] == ["1.0\n", "2\n"]
    assert doc_outputs.update(page) == 0


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("section", "package"), [("Linen", "flax"), ("Haiku", "haiku"), ("Equinox", "equinox")]
)
def test_each_library_of_models_has_a_section_that_runs(section, package, tmp_path):
    pytest.importorskip(package)
    check("linen_haiku_equinox", tmp_path, section)


ALONE = """
import os
del os.environ["TF_CONFIG"]
"""
AS_TASKS_OF_SLURM = """
import json, os
config = json.loads(os.environ.pop("TF_CONFIG"))
os.environ["PORT"] = config["cluster"]["worker"][0].split(":")[1]
os.environ |= {"SLURM_PROCID": str(config["task"]["index"]), "SLURM_STEP_NUM_TASKS": "2"}
os.environ |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("how", ["by TF_CONFIG", "by Slurm"])
def test_the_program_for_gpus_gives_the_losses_of_one_process_however_it_is_started(how):
    """Checked on emulated devices: it has not run on a GPU."""
    program = "\n".join(x.code for x in blocks_of("gpus"))
    for_slurm = program.replace(
        "Resolver()", 'Resolver(port_base=int(os.environ["PORT"]), gpus_per_node=0)'
    )
    assert for_slurm != program
    found = []
    for source, num_processes in (
        (ALONE + program, 1),
        (program if how == "by TF_CONFIG" else AS_TASKS_OF_SLURM + for_slurm, 2),
    ):
        first, *others = run_processes(
            source,
            num_processes=num_processes,
            devices_per_process=8 // num_processes,
            args=["--emulate"],
        )
        assert not any("losses" in other.stdout for other in others)
        found.append(json.loads(first.stdout.splitlines()[-1]))
    alone, together = found
    assert alone["replicas"] == together["replicas"] == 8
    np.testing.assert_allclose(together["losses"], alone["losses"], rtol=1e-5)


def test_the_files_that_the_architecture_names_exist():
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 40
    assert [
        x for x in named if not (ROOT / "tpudist" / x).exists() and not (ROOT / x).exists()
    ] == []


def test_the_architecture_has_every_context_and_every_home_of_variables():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for kind, column in ((ContextKind, "| `ContextKind` |"), (VariableHome, "| `VariableHome` |")):
        table = text[text.index(column) :].split("\n\n")[0]
        assert re.findall(r"^\| `(\w+)` \|", table, re.M)[1:] == [x.name for x in kind]
