"""The plugin, as another project meets it: each test is a pytest run of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT

COUNTS = """
def test_devices():
    import jax
    assert [d.platform for d in jax.devices()] == ["cpu"] * {count}
"""
ASKS_FOR_THE_FIXTURE = """
def test_fixture(emulated_devices):
    import jax
    assert emulated_devices == jax.devices()
    assert len(emulated_devices) == 3
"""


def run_pytest(folder: Path, source: str, *args: str, setting: str = "", conftest: str = ""):
    (folder / "pytest.ini").write_text(f"[pytest]\n{setting}\n")
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(source)
    root = str(ROOT)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "tpudist.pytest_plugin", *args]
    done = subprocess.run(
        command,
        cwd=folder,
        env=env | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_setting_gives_every_test_that_many_devices(tmp_path):
    source = COUNTS.format(count=3) + ASKS_FOR_THE_FIXTURE
    code, output = run_pytest(tmp_path, source, setting="tpudist_devices = 3")
    assert code == 0, output


@pytest.mark.slow
def test_the_option_wins_over_the_setting(tmp_path):
    args = ["--tpudist-devices", "2"]
    code, output = run_pytest(
        tmp_path, COUNTS.format(count=2), *args, setting="tpudist_devices = 3"
    )
    assert code == 0, output


@pytest.mark.slow
def test_without_a_number_the_devices_are_the_real_ones_and_tpudist_is_not_started(tmp_path):
    code, output = run_pytest(tmp_path, COUNTS.format(count=1))
    assert code == 0, output


@pytest.mark.slow
def test_the_fixture_without_a_number_says_how_to_give_one(tmp_path):
    code, output = run_pytest(tmp_path, ASKS_FOR_THE_FIXTURE)
    assert code == 1
    assert "set tpudist_devices = 8 under [tool.pytest.ini_options]" in output


@pytest.mark.slow
def test_emulation_after_the_start_of_jax_fails_before_any_test_runs(tmp_path):
    code, output = run_pytest(
        tmp_path,
        COUNTS.format(count=3),
        setting="tpudist_devices = 3",
        conftest="import jax\njax.devices()\n",
    )
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "emulate(3): JAX has already started" in output
    assert "Do it in a fixture instead" in output


@pytest.mark.parametrize(
    ("number", "complaint"),
    [
        pytest.param("0", "requests 0 devices", marks=pytest.mark.slow),
        ("many", "tpudist_devices = many: not a number of devices"),
    ],
)
def test_an_invalid_number_is_rejected(tmp_path, number, complaint):
    code, output = run_pytest(tmp_path, "", setting=f"tpudist_devices = {number}")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert complaint in output
