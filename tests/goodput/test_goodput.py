"""A process records how it spends its time."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from places import ROOT
from tpudist.goodput import goodput
from tpudist.goodput.diagnosis import diagnose
from tpudist.goodput.run_history import NoRecords, read_run

PROGRAM = """
import os, sys, time
print(time.time(), flush=True)
import numpy as np
import tpudist
import tpudist.checkpoint.arrays  # Orbax, whose import takes longer than the input

tpudist.emulate(2)
strategy = tpudist.MirroredStrategy()
tpudist.record_goodput(sys.argv[1])
tpudist.record_goodput(sys.argv[1])  # nothing more

def examples():
    for _ in range(4):
        time.sleep(0.5)
        yield np.ones((4, 3), np.float32)

def step(x):
    return tpudist.get_replica_context().all_reduce("sum", x.sum())

with strategy.scope():
    state = tpudist.TrainState(w=tpudist.Variable(1.0))
manager = tpudist.checkpoint.CheckpointManager(state, sys.argv[1] + "/checkpoints")
dataset = strategy.experimental_distribute_dataset(examples)
for x in dataset:
    strategy.run(step, (x,))
    time.sleep(0.1)
manager.save(1 + len(sys.argv[2:]))
manager.wait()
strategy.run(lambda: 1.0)
time.sleep(1)
print(time.time(), flush=True)
if sys.argv[2:]:
    time.sleep(3)
    os.kill(os.getpid(), 9)
"""


def run(folder, *args):
    """Returns the times of start, first line, last line and end of the program, and its notes."""
    start = time.time()
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *args],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == (-9 if args else 0), finished.stderr
    return (start, *map(float, finished.stdout.split()), time.time()), read_run(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder of a run that ended normally, with its times and notes."""
    folder = tmp_path_factory.mktemp("run")
    return folder, *run(folder)


def test_phases_add_up_to_the_time_of_the_process(finished):
    """The end of the interpreter cannot be recorded."""
    _, (started, first_line, last_line, ended), runs = finished
    ((start,),) = (x.values() for x in runs)
    assert start.ended_well
    noted_s = sum(start.seconds.values())
    assert abs(noted_s - (start.ended - start.began)) < 0.01 * noted_s
    assert started - 0.1 < start.began < first_line  # a process's start has a resolution of 0.01 s
    assert last_line < start.ended < ended
    assert start.seconds["input"] > 0.7  # of 2.0; the rest overlaps with other work of the loop
    assert start.seconds["checkpoint"] > 0
    assert start.seconds["compile"] > 0
    assert start.seconds["step"] > 1.3
    kinds = [x["kind"] for x in start.records]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert start.of_kind("save")[0]["calls"] == 4
    assert [x["call"] for x in start.of_kind("call")] == [0, 1, 2, 3, 4]
    assert start.of_kind("compile")[0]["function"] == "step"
    assert diagnose(runs).causes[0].text == "process 0 waited for its input"


@pytest.mark.slow
def test_a_killed_process_loses_few_records(finished):
    """A note is written each second, so some notes follow the last line, 3 s before the end."""
    folder = finished[0]
    (_, _, last_line, ended), runs = run(folder, "killed")
    assert [x[0].ended_well for x in runs] == [True, False]
    start = runs[1][0]
    assert last_line < start.ended < ended
    assert sum(start.seconds.values()) == pytest.approx(start.ended - start.began, rel=0.01)


def test_incomplete_lines_are_ignored(tmp_path):
    folder = tmp_path / "goodput"
    folder.mkdir()
    first = {"kind": "start", "time": 2.0, "process": 3, "began": 1.0}
    lines = [first, {"kind": "time", "time": 4.0, "seconds": {"step": 3.0}, "calls": 7}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"kind": "ti'
    (folder / "process-3-0000.jsonl").write_text(text)
    (folder / "process-4-0000.jsonl").write_text('{"kind"')
    ((start,),) = (x.values() for x in read_run(tmp_path))
    assert (start.process, start.num_calls, start.ended) == (3, 7, 4.0)


def test_a_folder_without_records_raises_an_error_with_the_remedy(tmp_path):
    with pytest.raises(NoRecords, match="record_goodput"):
        read_run(tmp_path)
    with pytest.raises(NoRecords, match="The folder .*missing does not exist"):
        read_run(tmp_path / "missing")


def test_nothing_is_recorded_without_a_request():
    assert goodput.current_recorder() is None
    with goodput.phase(goodput.Phase.INPUT):
        goodput.begin_call()
        goodput.note("some")
    goodput.flush()


def test_a_thread_that_was_left_behind_closes_no_phase_of_the_next_one(tmp_path, monkeypatch):
    """A thread that waits for a lost process leaves its phase after the next thread has begun."""
    recorder = goodput._Recorder((tmp_path / "records").open("x"), 0, 1)
    monkeypatch.setattr(goodput, "recorder", recorder)
    opened = goodput.phase(goodput.Phase.WAIT)
    opened.__enter__()
    with ThreadPoolExecutor(1) as next_thread:
        next_thread.submit(goodput.follow_thread).result()
        opened.__exit__()
        next_thread.submit(goodput.phase(goodput.Phase.INPUT).__enter__).result()
        recorder.close()
    assert [phase for phase, _ in recorder._stack] == [goodput.Phase.STARTUP, goodput.Phase.INPUT]


def test_two_programs_that_are_both_process_0_write_their_own_files(tmp_path, monkeypatch):
    """The other program creates its file after this one has looked for a free name."""
    monkeypatch.setattr(goodput, "recorder", None)
    (tmp_path / "goodput").mkdir()
    (tmp_path / "goodput/process-0-0000.jsonl").touch()
    monkeypatch.setattr(Path, "exists", lambda _: False)
    goodput.record_goodput(tmp_path)
    goodput.recorder.close()
    assert len(list((tmp_path / "goodput").iterdir())) == 2


def test_a_long_run_records_the_same_number_of_calls_per_octave():
    noted = [x for x in range(1 << 20) if x % goodput.stride_of(x) < 2]
    assert noted[:64] == list(range(64))
    assert len(noted) < 64 * 2 * 16
    assert all(goodput.stride_of(x) <= max(1, x // 32) for x in noted)
