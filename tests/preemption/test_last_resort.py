"""A program that received a notice and never reaches a boundary where it would save."""

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
from tpudist.preemption import last_resort
last_resort.NO_BOUNDARY_S = 3.0
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
            assert 2 < time.monotonic() - start < 25
        finally:
            process.kill()
        assert "has not reached a boundary between steps" in process.stderr.read()


def test_a_program_with_slow_steps_is_given_time():
    pace = Pace()
    assert pace.limit_s == last_resort.NO_BOUNDARY_S == 10
    pace._last_s -= 100  # it has begun so long ago
    pace.reach_boundary()
    assert pace.limit_s == last_resort.PATIENCE_S
    pace._last_s -= 50
    pace.reach_boundary()
    assert 200 <= pace.limit_s < 210


def test_the_last_resort_ends_only_programs_without_boundaries(monkeypatch):
    ended = []
    monkeypatch.setattr(last_resort, "_POLL_S", 0.01)
    monkeypatch.setattr(last_resort, "NO_BOUNDARY_S", 0.2)
    monkeypatch.setattr(LastResort, "_end", lambda self, waited_s: ended.append(self))
    notices = {does: Notice(does) for does in ("come", "save", "close", "nothing")}
    paces = {does: Pace() for does in notices}
    last = {does: LastResort(notices[does], paces[does]) for does in notices}
    time.sleep(0.4)
    assert not ended  # nobody has asked
    for notice in notices.values():
        notice.give("SIGTERM")
    paces["come"].reach_boundary()
    paces["save"].has_acted = True
    last["close"].close()
    time.sleep(0.6)
    for one in last.values():
        one.close()
    assert set(ended) == {last["nothing"]}
