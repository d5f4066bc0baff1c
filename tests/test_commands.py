"""README.md, CONTRIBUTING.md and .ci/run give the same commands, and README's example works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def blocks(document: str, language: str = "bash") -> list[list[str]]:
    """The lines of each block in a language."""
    pattern = rf"^```{language}\n(.*?)^```"
    found = re.findall(pattern, (ROOT / document).read_text(), re.M | re.S)
    return [block.splitlines() for block in found]


def without_folder(commands: list[str]) -> list[str]:
    """CI has its environment on the path; a reader's is `.venv`."""
    return [command.removeprefix(".venv/bin/") for command in commands]


CI = (ROOT / ".ci" / "run").read_text().splitlines()


def test_ci_ends_with_the_four_commands_of_contributing():
    (four,) = blocks("CONTRIBUTING.md")
    # CI looks at the format, and does not change it.
    assert CI[-4:] == [re.sub(r"^ruff format", "ruff format --check", line) for line in four]


def standing_alone() -> list[list[str]]:
    """The blocks of README that make their own environment: training, the tests, a plan."""
    return [block for block in blocks("README.md") if any("-m venv" in line for line in block)]


def test_readme_has_two_commands_and_a_plan_that_each_stand_alone():
    train, test, plan = standing_alone()
    for commands in (train, test, plan):
        assert commands[0] == "python3 -m venv .venv"
        assert commands[1].startswith(".venv/bin/python -m pip install")
    assert train[-1] == ".venv/bin/python scripts/train.py"
    assert test[-1] == ".venv/bin/python -m pytest"
    assert plan[-1].startswith(".venv/bin/tpudist plan ")


def test_ci_installs_and_tests_as_readme_says():
    _, test, _ = standing_alone()
    _, install, run = without_folder(test)
    assert install.replace("install", "install --quiet", 1) in CI
    assert run == CI[-1]


@pytest.mark.multiprocess
def test_the_example_in_readme_runs_and_learns():
    (example,) = blocks("README.md", "python")
    command = [sys.executable, "-W", "error", "-c", "\n".join(example)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-3  # it starts at about 4
