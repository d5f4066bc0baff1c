"""Faults in real processes, and whether the doctor names each first.

`DOCTOR_RUNS=4` runs each fault four times: twenty runs.
"""

import os
import subprocess
import sys

import pytest

from places import ROOT
from tpudist.goodput.diagnosis import diagnose
from tpudist.goodput.run_history import read_run

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

PROGRAM = """
import os, sys, time
import jax
import jax.numpy as jnp
import numpy as np
import tpudist

fault, folder, start = sys.argv[1], sys.argv[2], int(sys.argv[3])
tpudist.emulate()
strategy = tpudist.MultiWorkerMirroredStrategy()
me = jax.process_index()

def examples():
    while True:
        if fault == "reader" and me == 1:
            time.sleep(0.06)
        yield np.ones((8, 16), np.float32)

with strategy.scope():
    w = tpudist.Variable(jnp.ones((16, 16)))
state = tpudist.TrainState(w=w)
manager = tpudist.checkpoint.CheckpointManager(state, folder + "/checkpoints")
is_new = manager.restore_or_initialize() is None

def make():
    def step(x):
        return tpudist.get_replica_context().all_reduce("sum", (x @ w).mean())
    return step

step, steps = make(), iter(strategy.experimental_distribute_dataset(examples))
while state.step < 50:
    i = state.step
    if i == start and me == 1 and is_new:
        if fault == "stall":
            time.sleep(3)
        if fault == "death":
            os.kill(os.getpid(), 9)
    if fault == "slow" and me == 1:
        time.sleep(0.05)
    if fault == "recompile" and i >= start:
        step = make()
    float(strategy.run(step, (next(steps),)))
    state.step += 1
    if state.step == 10:
        manager.save(10)
manager.wait()
"""
NAMED = {
    "stall": "process 1 started its steps later than the others",
    "slow": "process 1 started its steps later than the others",
    "reader": "waited for its input",
    "recompile": "'step' was compiled again",
    "death": "all processes were restarted: Process 1 ended without a message",
}


@pytest.mark.exhaustive  # tests/goodput/test_diagnosis.py has each of them, from notes
@pytest.mark.parametrize("seed", range(int(os.environ.get("DOCTOR_RUNS", "1"))))
@pytest.mark.parametrize("fault", NAMED)
def test_the_fault_is_named_first(fault, seed, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    launch = [sys.executable, "-m", "tpudist", "launch", "-n", "2", "--devices-per-process", "2"]
    subprocess.run(
        [*launch, "--restarts", "1", str(script), fault, str(tmp_path), str(20 + 7 * seed)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TPUDIST_GOODPUT": str(tmp_path)},
        check=True,
        capture_output=True,
        timeout=120,
    )
    runs = read_run(tmp_path)
    found = diagnose(runs)
    assert NAMED[fault] in found.causes[0].text, found.causes
    assert len(runs) == (2 if fault == "death" else 1)
    for process in (0, 1):
        wall_s = runs[-1][process].ended - runs[0][process].began
        assert abs(sum(found.seconds[process].values()) - wall_s) < 0.01 * wall_s
    said = subprocess.run(
        [sys.executable, "-m", "tpudist", "doctor", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "process 0" in said
    assert "1. " in said
