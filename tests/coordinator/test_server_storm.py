"""Storms: closures count once each while workers, servers and the program are killed."""

import json
import os
import signal
import subprocess
import sys

import pytest

from places import PROGRAMS, PYTHONPATH
from process_trees import are_gone, descendants
from server_faults import wait_until

PROGRAM = PROGRAMS / "server_storm.py"

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture(params=["threads", pytest.param("ray", marks=pytest.mark.exhaustive)])
def engine(request):
    if request.param == "ray":
        request.getfixturevalue("needs_ray")
    return request.param


def begin(folder, engine, num_closures, num_kills, seed):
    words = [PROGRAM, folder, engine, num_closures, num_kills, seed, 2]
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=PROGRAM.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={x: value for x, value in os.environ.items() if not x.startswith("RAY_")}
        | {"PYTHONPATH": PYTHONPATH},
    )


def finish(program):
    """Runs a storm to its end; returns its counts."""
    out, error = program.communicate(timeout=200)
    assert program.returncode == 0, f"{out[-4000:]}\n{error[-4000:]}"
    return json.loads(out.splitlines()[-1])


def test_a_killed_program_resumes_from_its_log(tmp_path, engine):
    """It resumes with the first unfinished closure, and survives another storm.

    The killed program leaves no processes.
    """
    size, num_kills = 300, 6
    folder = tmp_path / "log"
    program = begin(folder, engine, size, 2, 1)
    with program:
        finished = folder / "finished.records"
        wait_until(
            lambda: finished.exists() and finished.stat().st_size > 5000,
            "some closures",
            within_s=100,
        )
        started = descendants(program.pid)
        program.send_signal(signal.SIGKILL)
        program.wait(10)
    assert are_gone(started, within_s=30)
    figures = finish(begin(folder, engine, size, num_kills, 2))
    assert 0 < figures["began_at"] < size
    assert sum(figures["kills"].values()) == num_kills
    assert figures["wrong"] == {}
    assert figures["finished"] == figures["again"]["next"] == size
