"""The snippets of the guides in docs run one after the other, as they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from places import ROOT
from processes import run_processes
from tpudist.context import ContextKind
from tpudist.context.strategy_base import VariableHome


def snippets(guide: str, section: str | None = None) -> str:
    """The snippets of a guide as one program.

    Of a guide whose sections stand by themselves, those of one section, after the ones before all.
    """
    text = (ROOT / "docs" / guide).read_text()
    if section is not None:
        first, *sections = re.split(r"^## ", text, flags=re.M)
        [found] = [x for x in sections if x.startswith(section + "\n")]
        text = first + found
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))


def run(guide: str, folder: Path, section: str | None = None) -> str:
    """What the snippets of a guide, or of a section, print, run in a folder."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippets(guide, section)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_snippets_about_data_and_checkpoints_run_one_after_the_other(tmp_path):
    printed = run("data_and_checkpoints.md", tmp_path)
    assert "40 steps; saved: [20, 30, 40]" in printed
    assert "Restored 2 values of step 40" in printed
    assert "FileDataset" in printed


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_snippets_about_the_training_loop_run_one_after_the_other(tmp_path):
    printed = run("training_loop.md", tmp_path)
    assert "step 48/48  loss " in printed
    assert "Goes on after step 25 of 60, from " in printed
    assert "step 60/60  held out distance " in printed


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_program_that_fine_tunes_learns(tmp_path):
    printed = run("finetuning.md", tmp_path)
    before, after = re.search(r"from (\S+) to (\S+) nats a byte", printed).groups()
    assert float(after) < float(before) - 0.5
    assert (tmp_path / "finetuned" / "model.safetensors").exists()


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_snippets_about_planning_run_one_after_the_other(tmp_path):
    printed = run("planning.md", tmp_path)
    assert "True 8 " in printed  # it fits, on 8 replicas
    assert "all-reduce ('replica',) ici" in printed
    assert (tmp_path / "saved_plan").is_dir()


# Guides that are run as a whole, for what they assert.
WHOLE = (
    "from_pmap",
    "from_jit",
    "batch_norm",
    "keras_fit",
    "mixed_precision",
    "model_parallelism",
    "debugging",
    "determinism",
    "gradients",
    "parameter_servers",
    "pretrained",
    "verification",
)
# Guides that other tests run, and a guide of programs for several machines.
OTHERS = (
    "architecture",
    "data_and_checkpoints",
    "finetuning",
    "gpus",
    "linen_haiku_equinox",
    "planning",
    "porting",
    "training_loop",
)
NOT_RUN = ("several_processes",)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("guide", WHOLE)
def test_the_snippets_of_a_guide_run_one_after_the_other(guide, tmp_path):
    """Each asserts what the text around it says."""
    run(f"{guide}.md", tmp_path)


def test_each_guide_with_snippets_is_run():
    pages = (ROOT / "docs").glob("*.md")
    shown = [page.stem for page in pages if "\n```python\n" in page.read_text()]
    assert sorted(shown) == sorted((*WHOLE, *OTHERS, *NOT_RUN))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("section", "package"), [("Linen", "flax"), ("Haiku", "haiku"), ("Equinox", "equinox")]
)
def test_each_library_of_models_has_a_section_that_runs(section, package, tmp_path):
    pytest.importorskip(package)
    run("linen_haiku_equinox.md", tmp_path, section)


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
    """On emulated devices: no GPU has run it."""
    program = snippets("gpus.md")
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


@pytest.mark.slow
def test_the_strategy_that_the_architecture_shows_works(tmp_path):
    printed = run("architecture.md", tmp_path)
    assert printed == "PairStrategy(replica=4, pair=2 on cpu) ('pair',) 128.0\n"
