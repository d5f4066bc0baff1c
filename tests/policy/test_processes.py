"""The helper that starts processes: its cluster works, and no failure is silent or slow."""

import os
import signal
import time
from pathlib import Path

import pytest

from processes import run_processes, start_processes

pytestmark = pytest.mark.multiprocess

PSUM = """
    import json, os
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from processes import report

    os.environ["NPROC"] = "32"  # on few cores the rendezvous of the collectives starves with less
    config = json.loads(os.environ["TF_CONFIG"])
    workers, index = config["cluster"]["worker"], config["task"]["index"]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(os.environ["TPUDIST_EMULATE"]))
    jax.distributed.initialize(workers[0], len(workers), index)

    mesh = jax.make_mesh((jax.device_count(),), ("replica",), axis_types=(AxisType.Auto,))
    x = jax.make_array_from_callback(
        (jax.device_count(),), NamedSharding(mesh, P("replica")),
        lambda index: np.array([index[0].start + 1.0], np.float32),
    )
    total = jax.jit(jax.shard_map(
        lambda x: jax.lax.psum(x, "replica"), mesh=mesh, in_specs=P("replica"), out_specs=P()
    ))(x)[0]
    report({"index": index, "devices": jax.device_count(), "sum": total.item()})
"""


@pytest.mark.slow
def test_two_processes_of_two_devices_reduce_over_all_four():
    results = run_processes(PSUM, devices_per_process=2)
    assert [r.result for r in results] == [
        {"index": index, "devices": 4, "sum": 1.0 + 2 + 3 + 4} for index in range(2)
    ]


def test_each_process_gets_the_arguments_and_its_output_comes_back():
    program = """
        import sys
        print("out", *sys.argv[1:])
        print("err", file=sys.stderr)
    """
    (only,) = run_processes(program, num_processes=1, args=["--steps", "3"])
    assert only.stdout == "out --steps 3\n"
    assert only.stderr == "err\n"
    assert only.result is None


def test_a_program_may_be_a_file(tmp_path):
    file = tmp_path / "program.py"
    file.write_text("from processes import report\nreport([1, None])\n")
    assert [r.result for r in run_processes(file)] == [[1, None], [1, None]]


def test_a_failing_process_ends_the_others_and_all_outputs_are_shown(tmp_path):
    program = f"""
        import json, os, pathlib, time
        print("I am", index := json.loads(os.environ["TF_CONFIG"])["task"]["index"])
        ready = pathlib.Path({str(tmp_path / "ready")!r})
        if index == 0:
            ready.touch()
            time.sleep(60)
        while not ready.exists():
            time.sleep(0.01)
        raise SystemExit("no such luck")
    """
    start = time.monotonic()
    with pytest.raises(AssertionError, match="process 1 with exit code 1") as caught:
        run_processes(program)
    assert time.monotonic() - start < 30
    for part in ("I am 0", "I am 1", "no such luck", "process 0: killed", "process 1: exit code 1"):
        assert part in str(caught.value)


def test_a_process_killed_from_outside_is_named_with_its_signal():
    with pytest.raises(AssertionError, match="process 0 with exit code -9"):
        run_processes("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", num_processes=1)


@pytest.mark.slow
def test_a_hanging_process_is_killed_with_its_children_and_reported(tmp_path):
    child = tmp_path / "child"
    program = f"""
        import subprocess, time
        child = subprocess.Popen(["sleep", "60"])
        open({str(child)!r}, "w").write(str(child.pid))
        print("waiting for nobody")
        time.sleep(60)
    """
    with pytest.raises(AssertionError, match=r"still running after 2 s: 0\.") as caught:
        run_processes(program, num_processes=1, timeout_s=2)
    assert "waiting for nobody" in str(caught.value)
    assert _ends(int(child.read_text()))


def _ends(pid: int, within_s: float = 5) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # dead; its new parent has not read its exit code yet
            return True
        time.sleep(0.05)
    os.kill(pid, 9)
    return False


WAITING = """
    import json, os, time
    from processes import report, say

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    report([index, os.environ["MORE"]])
    say("ready")
    if index == 0:
        time.sleep(60)
    raise SystemExit(5)
"""


def test_a_process_that_is_sent_a_signal_says_how_it_ended():
    with start_processes(WAITING, env={"MORE": "env"}) as running:
        running.wait_until_said(0, "ready")
        running.signal(0, signal.SIGKILL)
        first, second = running.wait(exit_codes=(-9, 5))
    assert [first.exit_code, second.exit_code] == [-9, 5]
    assert [first.result, second.result] == [[0, "env"], [1, "env"]]


def test_an_exit_code_that_was_not_expected_or_a_word_not_said_is_a_failure():
    with start_processes(WAITING, env={"MORE": ""}) as running:
        with pytest.raises(AssertionError, match="Process 1 did not say 'never'"):
            running.wait_until_said(1, "never")
        with pytest.raises(AssertionError, match="process 1 with exit code 5"):
            running.wait(exit_codes=(143,))
    assert running.workers[0].process.returncode == -9
