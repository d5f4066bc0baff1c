"""README.md, docs/planning.md, CONTRIBUTING.md and .ci/run give the same commands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from places import PYTHONPATH, ROOT


def blocks(document: str, language: str = "bash") -> list[list[str]]:
    """The lines of each block in a language."""
    pattern = rf"^```{language}\n(.*?)^```"
    found = re.findall(pattern, (ROOT / document).read_text(), re.M | re.S)
    return [block.splitlines() for block in found]


def without_folder(commands: list[str]) -> list[str]:
    """CI has its environment on the path; a reader's is `.venv`."""
    return [command.removeprefix(".venv/bin/") for command in commands]


CI = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]


def test_ci_ends_with_the_commands_of_contributing():
    (lines,) = blocks("CONTRIBUTING.md")
    # CI runs each command on its own line, because bash continues after a failed `a && b`.
    commands = [command for line in lines for command in line.split(" && ")]
    # CI checks the format, and does not change it.
    assert CI[-5:] == [re.sub(r"^ruff format", "ruff format --check", x) for x in commands]


def test_ci_installs_the_extras_that_contributing_names():
    (extras,) = re.findall(r'pip install -e "\.\[(.*?)\]"', (ROOT / "CONTRIBUTING.md").read_text())
    assert '"$2/bin/python" -m pip install --quiet -e ".[$3]"' in CI
    in_both = {",".join(sorted(line.split()[3].split(","))) for line in CI if 'install "$' in line}
    assert in_both == {"test", ",".join(sorted(extras.split(",")))}


def standing_alone() -> list[list[str]]:
    """The blocks that make their own environment: training, the tests, a plan."""
    both = [*blocks("README.md"), *blocks("docs/planning.md")]
    return [block for block in both if any("-m venv" in line for line in block)]


def test_readme_has_two_commands_and_planning_has_a_plan_that_each_stand_alone():
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
    assert install == 'python -m pip install -e ".[test]"'
    assert 'install "$oldest" .venv-ci-oldest test' in CI
    assert run == CI[-1]


def test_ci_trains_and_has_two_shares_of_the_tests_as_readme_and_contributing_say():
    train, test, _ = (without_folder(commands) for commands in standing_alone())
    assert train[-1] in CI
    assert f"{test[-1]} --share +4" in CI
    assert f"{test[-1]} -m notebook --share all" in CI
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert '`python -m pytest -m "not slow"`' in contributing


SAMPLED = """
import pytest

@pytest.mark.exhaustive
@pytest.mark.parametrize("x", range(13))
def test_many(x): pass

@pytest.mark.exhaustive
@pytest.mark.parametrize("x", range(2))
def test_two(x): pass

@pytest.mark.slow
def test_one(): pass

def test_always(): pass
"""


def collect(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Collects `SAMPLED` with the options and hooks of tests/conftest.py."""
    (folder / "test_sampled.py").write_text(SAMPLED)
    command = ["-p", "conftest", "-c", os.devnull, "--rootdir", str(folder), "-n", "0"]
    command += ["--collect-only", "-q", *options]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )


def names_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"::(\S+)", done.stdout)


@pytest.mark.slow
def test_cases_are_dealt_out_to_shares_and_named_files_have_them_all(tmp_path):
    everything = names_of(collect(tmp_path, "-m", ""))
    assert len(everything) == 13 + 2 + 1 + 1
    assert names_of(collect(tmp_path, "test_sampled.py")) == everything
    assert names_of(collect(tmp_path, "-k", "many or two")) == everything[:15]
    assert names_of(collect(tmp_path, "-m", "exhaustive")) == everything[:15]
    shares = [
        {everything.index(x) for x in names_of(collect(tmp_path, "--share", str(share)))}
        for share in range(12)
    ]
    assert all(16 in share for share in shares)
    assert sorted(x for share in shares for x in share - {16}) == list(range(16))
    assert {sum(x < 13 for x in share) for share in shares} == {1, 2}


@pytest.mark.slow
def test_a_share_that_does_not_exist_is_refused(tmp_path):
    done = collect(tmp_path, "--share", "12")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--share 12: must be 'all', a number from 0 to 11, or such as +3" in done.stderr


def interpreters(folder: Path, *, on_path=(), in_pyenv=()) -> dict[str, str]:
    """The environment of a machine with some Pythons: each answers with its version only."""
    (folder / "bin").mkdir()
    tools = {
        "pyenv": f'[ $1 = root ] && echo {folder}/pyenv || printf "%s\\n" {" ".join(in_pyenv)}'
    }
    if not in_pyenv:
        tools = {}
    for version in on_path:
        tools[f"python{version}"] = f"case $2 in *{version}*) exit 0; esac; exit 1"
    for version in in_pyenv:
        minor = version.rpartition(".")[0]
        tools[f"python{minor}"] = "exit 127"  # as pyenv does for other versions
        tools[f"../pyenv/versions/{version}/bin/python"] = (
            f"case $2 in *{minor}*) exit 0; esac; exit 1"
        )
    for name, body in tools.items():
        file = folder / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    return {"PATH": f"{folder}/bin:/bin:/usr/bin", "CI": "true"}


def ask_ci(command: str, environment: dict[str, str]):
    """Runs a command with the functions of .ci/run."""
    text = (ROOT / ".ci" / "run").read_text()
    functions = re.findall(r"^\w+\(\) \{.*?^\}$", text, re.M | re.S)
    script = "\n".join(["set -euo pipefail", *functions, command])
    return subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False
    )


def test_ci_finds_interpreters_on_the_path_and_by_pyenv(tmp_path):
    environment = interpreters(tmp_path, on_path=["3.19"], in_pyenv=["3.17.1", "3.18.0"])
    assert ask_ci("find_python 3.19", environment).stdout == "python3.19\n"
    found = ask_ci("find_python 3.20 3.18 3.17", environment).stdout
    assert found == f"{tmp_path}/pyenv/versions/3.18.0/bin/python\n"
    assert ask_ci("find_python 3.20", environment).returncode == 1


@pytest.mark.parametrize(
    ("in_pyenv", "ci", "code"), [([], "true", 0), (["3.18.0"], "true", 1), (["3.18.0"], "", 0)]
)
def test_a_missing_interpreter_is_said_loudly_and_fails_ci_where_pyenv_has_it(
    tmp_path, in_pyenv, ci, code
):
    environment = interpreters(tmp_path, in_pyenv=in_pyenv) | {"CI": ci}
    (tmp_path / "pyenv/versions/3.18.0/bin/python").unlink(missing_ok=True)
    done = ask_ci("x=$(find_python 3.18 3.17) || missing 3.18 3.17", environment)
    assert done.returncode == code
    assert "#### NOT TESTED: no Python 3.18/3.17 was found" in done.stderr
