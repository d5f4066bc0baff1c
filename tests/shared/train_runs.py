"""Runs of scripts/train.py that tests interrupt, and the files that they leave."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kept_programs import jax_keeps_programs
from places import ROOT
from tpudist.training.metrics_writers import read_lines

SCRIPT = ROOT / "scripts" / "train.py"


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Keeps compiled programs for this module and its children: most runs here need the same."""
    folder = tmp_path_factory.mktemp("compiled")
    with jax_keeps_programs(folder) as settings, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name.upper(), str(value))
        yield


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines_of(folder) if line["split"] == "train"]


def signalled(args: list[str], out: Path, number: int, num_steps: int) -> tuple[int, str, str]:
    """Signals a run after a number of steps; returns exit code, stdout and stderr."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *args, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent)},
    )
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if max((line["step"] for line in read_lines(out)), default=0) >= num_steps:
                break
            time.sleep(0.01)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, stdout, stderr
