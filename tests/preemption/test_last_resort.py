"""A program that was asked to end, and never comes to where it would save."""

import os
import signal
import subprocess
import sys
import time

import pytest

from places import ROOT
from tpudist.preemption import last_resort
from tpudist.preemption.last_resort import LastResort, Pace
from tpudist.preemption.notice import Notice

PROGRAM = """
import sys, time, tpudist
manager = tpudist.checkpoint.CheckpointManager(tpudist.TrainState(), sys.argv[1])
handler = tpudist.experimental.PreemptionCheckpointHandler(None, manager)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_program_without_boundaries_ends_by_sigterm(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
            assert 9 < time.monotonic() - start < 30
        finally:
            process.kill()
        assert "has come to no boundary between steps" in process.stderr.read()


def test_a_program_with_slow_steps_is_given_time():
    pace = Pace()
    assert pace.limit_s == last_resort.WITHOUT_STEPS_S
    pace._last_s -= 100  # it has begun so long ago
    pace.reach_boundary()
    assert pace.limit_s == last_resort.PATIENCE_S
    pace._last_s -= 50
    pace.reach_boundary()
    assert 200 <= pace.limit_s < 210


@pytest.mark.parametrize("does", ["come", "save", "close", "nothing"])
def test_it_ends_only_who_comes_to_no_boundary(does, monkeypatch):
    ended = []
    monkeypatch.setattr(last_resort, "_POLL_S", 0.01)
    monkeypatch.setattr(last_resort, "WITHOUT_STEPS_S", 0.2)
    monkeypatch.setattr(LastResort, "_end", lambda self, waited_s: ended.append(waited_s))
    notice, pace = Notice("some"), Pace()
    last = LastResort(notice, pace)
    time.sleep(0.4)
    assert not ended  # nobody has asked
    notice.give("SIGTERM")
    if does == "come":
        pace.reach_boundary()
    pace.is_saving = does == "save"
    if does == "close":
        last.close()
    time.sleep(0.6)
    last.close()
    assert bool(ended) == (does == "nothing")
