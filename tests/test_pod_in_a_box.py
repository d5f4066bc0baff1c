"""A user's own program under faults, by the fixture `tpudist_pod`."""

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from test_pytest_plugin import run_pytest
from tpudist.pytest_plugin import Fault, Pod, PodError, draw_faults, isolated_hosts

pytestmark = [pytest.mark.multiprocess]

# A program that does not know the fixture.
PROGRAM = """
import sys
import time
import numpy as np
import tpudist

tpudist.emulate()
strategy = tpudist.MultiWorkerMirroredStrategy()
ones = strategy.experimental_distribute_values_from_function(lambda _: np.ones(3, np.float32))

def total(x):
    return tpudist.get_replica_context().all_reduce("sum", x)

for step in range(int(sys.argv[1])):
    result = strategy.run(total, (ones,))
    print("step", step, result.addressable_data(0)[0], flush=True)
    time.sleep(0.02)
print("done", strategy.num_replicas_in_sync)
"""


# Prints like `PROGRAM`, and starts immediately.
LIGHT = """
import sys
import time

for step in range(int(sys.argv[1])):
    print("step", step, 2.0, flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def light(tmp_path):
    file = tmp_path / "light.py"
    file.write_text(LIGHT)
    return file


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


def codes(ended):
    return [x.exit_code for x in ended]


@pytest.mark.slow
def test_processes_with_different_numbers_of_devices_run_the_program(tpudist_pod, program):
    with tpudist_pod(program, "5", devices_per_process=[3, 2]) as pod:
        ended = pod.wait(60)
    assert codes(ended) == [0, 0]
    assert all("step 4 5.0" in x.output and "done 5" in x.output for x in ended)


@pytest.mark.parametrize(
    ("kind", "exit_codes", "said"),
    [
        ("kill", [75, -9], "Process 1 ended without a message"),
        pytest.param(
            "raise",
            [1, 1],
            "RuntimeError: The test injected a fault at call 7 of process 1.",
            marks=(pytest.mark.slow, pytest.mark.exhaustive),
        ),
        pytest.param(
            "leave",
            [1, 1],
            "shared call(s), but process",
            marks=(pytest.mark.slow, pytest.mark.exhaustive),
        ),
    ],
)
def test_faults_strike_inside_at_a_call(kind, exit_codes, said, tpudist_pod, program):
    soon = "from tpudist.processes import process_watch\nprocess_watch.GRACE_S = 0.5\n"
    program.write_text(soon + PROGRAM)
    faults = [Fault(kind, process=1, at_call=7)]
    with tpudist_pod(program, "400", devices_per_process=2, faults=faults) as pod:
        ended = pod.wait(60)
    assert codes(ended) == exit_codes, ended
    assert said in ended[0].output
    assert "step 6 4.0" in ended[0].output


@pytest.mark.slow
def test_a_slow_process_is_waited_for(tpudist_pod, program):
    faults = [Fault("slow", process=0, at_call=3, seconds=0.3)]
    began = time.monotonic()
    with tpudist_pod(program, "10", devices_per_process=1, faults=faults) as pod:
        assert codes(pod.wait(60)) == [0, 0]
    assert time.monotonic() - began > 2.1


@pytest.mark.slow
def test_processes_are_stopped_resumed_and_killed_from_outside(tpudist_pod, light):
    with tpudist_pod(light, "200", devices_per_process=1) as pod:
        pod.wait_for_line(1, "step 5")
        pod.stop(1)
        time.sleep(0.3)  # until its earlier output has arrived
        before = pod.output(1)
        time.sleep(0.5)
        assert pod.output(1) == before
        pod.resume(1)
        pod.wait_for_line(1, "step 40")
        pod.kill(1)
        ended = pod.wait(60)
    assert codes(ended) == [0, -9]


@pytest.mark.slow
def test_a_different_program_and_a_process_that_never_starts(tpudist_pod, program, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(PROGRAM.replace('"sum", x', '"sum", 2 * x'))
    with tpudist_pod(program, "400", devices_per_process=1, programs={1: other}) as pod:
        ended = pod.wait(60)
    assert codes(ended) == [1, 1]
    assert all("ProcessesDifferError" in x.output for x in ended)
    with tpudist_pod(program, "4", devices_per_process=1, absent=[1]) as pod:
        pod.wait_for_line(0, "waits for process 1 of 2")
        pod.interrupt(0)
        assert pod.wait(60)[1].exit_code is None


@pytest.mark.slow
def test_a_failing_test_shows_the_output_of_processes_and_leaves_nothing(
    light, tmp_path, monkeypatch
):
    # A separate folder, because other tests have pods at the same time.
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    pids = []

    def fail():
        with Pod(light, "4000") as pod:
            pod.wait_for_line(0, "step 3 2.0")  # Python's output is not buffered
            pids.extend([pod.pid(0), pod.pid(1)])
            assert list(temporary.iterdir()) != []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert "=== process 1: running" in caught.value.__notes__[0]
    assert "step 3 2.0" in caught.value.__notes__[0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_pod_that_exceeds_its_time_limit_is_killed_and_shows_its_output(light):
    with Pod(light, "4000", devices_per_process=1, timeout_s=7) as pod:
        with pytest.raises(PodError, match=r"step \d+ 2.0"):
            pod.wait_for_line(1, "never printed")
        with pytest.raises(PodError, match="All processes were killed after 7 s"):
            pod.wait(60)
    with Pod(light, "4000", devices_per_process=1) as pod:
        with pytest.raises(PodError, match="did not end within 1 s"):
            pod.wait(1)


@pytest.mark.slow
def test_a_program_that_survives_does_so(tpudist_pod, tmp_path):
    file = tmp_path / "survivor.py"
    body = PROGRAM.partition("strategy = ")
    loop = "strategy = " + body[2].replace("    time.sleep(0.02)", "    time.sleep(0.05)")
    inside = "".join(f"    {line}\n" for line in loop.splitlines())
    file.write_text(
        f"{body[0]}\ndef train(survivor):\n{inside}\ntpudist.experimental.survive(train)\n"
    )
    options = {"num_processes": 2, "devices_per_process": 1, "launch": ("--spares", "1")}
    with tpudist_pod(file, "60", **options) as pod:
        pod.wait_for_line(1, "step 5")
        pids = [pod.pid(i) for i in range(3)]
        pod.kill(1)
        pod.wait_for_line(2, "step 5 2.0")
        ended = pod.wait(60)
    assert codes(ended) == [0], ended[0].output
    assert "process 1 was killed (SIGKILL): the others continue." in ended[0].output
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.slow
def test_disconnected_hosts_report_the_failure(tpudist_pod, program):
    if why := isolated_hosts.why_unsupported():
        pytest.skip(why)
    soon = "from tpudist.processes import peer_connections\npeer_connections.DEAD_PEER_S = 6.0\n"
    program.write_text(soon + PROGRAM)
    with tpudist_pod(program, "4000", devices_per_process=1, separate_hosts=True) as pod:
        pod.wait_for_line(1, "step 5")
        pod.unplug()
        ended = pod.wait(60)
    assert codes(ended) == [75, 75]
    for index, one in enumerate(ended):
        assert f"[tpudist p{index}] Process {1 - index}" in one.output
        assert "Restart all processes" in one.output
    # The first to notice ends; both share one kernel here, which notifies the other.
    assert any("or its host or network failed" in x.output for x in ended)


def test_the_same_seed_draws_the_same_faults():
    found = draw_faults(7, num_processes=4, num_calls=20, count=2)
    assert found == draw_faults(7, num_processes=4, num_calls=20, count=2)
    assert len({fault.process for fault in found}) == 2
    assert {x.kind for seed in range(60) for x in draw_faults(seed, 4, 20)} == {
        "raise",
        "kill",
        "stop",
        "slow",
        "leave",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices_per_process": [1, 2, 3]}, "Pass one number, or one number per process"),
        ({"launch": (), "absent": [1]}, "launch=... starts the same program"),
        ({"launch": (), "hosts": object()}, "Omit programs, absent, separate_hosts and"),
    ],
)
def test_arguments_that_do_not_match_raise_value_error(options, message, program):
    with pytest.raises(ValueError, match=message):
        Pod(program, **options)
    with pytest.raises(ValueError, match="a fault must be one of raise, kill"):
        Fault("explode", 0, 0)


@pytest.mark.parametrize("launch", [(), None])
def test_a_pod_that_cannot_start_raises_the_cause(launch, program, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/missing/python")
    with pytest.raises(FileNotFoundError, match="/missing/python"):
        Pod(program, launch=launch)


@pytest.mark.slow
def test_one_test_can_have_two_pairs_of_hosts():
    if why := isolated_hosts.why_unsupported():
        pytest.skip(why)
    with isolated_hosts.make_isolated_hosts() as first:
        with isolated_hosts.make_isolated_hosts() as second:
            assert first.prefix(0) != second.prefix(0)


@pytest.mark.slow
def test_another_project_uses_the_fixture(tmp_path, light):
    source = """
def test_it(tpudist_pod):
    with tpudist_pod("light.py", "3", devices_per_process=1) as pod:
        assert [x.exit_code for x in pod.wait(60)] == [0, 0]
"""
    code, output = run_pytest(tmp_path, source)
    assert code == 0, output
