"""Programs that survive: processes are lost and join, and the losses match a calm run."""

import os
import signal
import time

import pytest

from survival_runs import (
    STEPS,
    Run,
    is_running,
    require_outcome,
    require_same_numbers,
    run_with_fault,
)
from tpudist.goodput.diagnosis import diagnose
from tpudist.goodput.run_history import read_run

pytestmark = [pytest.mark.multiprocess]
TWO = ("-n", "2", "--devices-per-process", "2")
FOUR = ("-n", "4", "--devices-per-process", "2")
RUNS = int(os.environ.get("SURVIVAL_RUNS", "9"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A run of one process, to which nothing happens."""
    options = ("-n", "1", "--devices-per-process", "8")
    with Run(tmp_path_factory.mktemp("calm"), *options, env={"PAUSE_S": "0"}) as run:
        seen = run.wait()
    assert seen.code == 0, seen.output
    assert f"RESULT {STEPS}" in seen.output
    assert sorted(seen.losses()) == list(range(1, STEPS + 1))
    ids = seen.examples()
    epoch = sorted(ids[1] + ids[2] + ids[3])
    assert len(set(epoch)) == 192  # and 8 in the fourth step
    return seen


def pids_at_the_end(seen):
    return {x["pid"] for x in seen.lines if x["step"] == STEPS}


def require_explained_time(starts, process):
    """The phases of one process add up to the time from its first start to its end."""
    spent = sum(sum(x[process].seconds.values()) for x in starts)
    wall_s = starts[-1][process].ended - starts[0][process].began
    assert abs(spent - wall_s) < 0.01 * wall_s


def test_the_others_continue_in_their_processes_after_a_kill(calm, tmp_path):
    """The doctor also explains the time of a process that continued."""
    with Run(tmp_path, *FOUR, env={"TPUDIST_GOODPUT": str(tmp_path)}) as run:
        run.wait_for_step(10, of_all=True)
        before = run.pids()
        run.signal(0, signal.SIGKILL)  # that in which all meet, in plain JAX
        seen = run.wait()
    assert seen.code == 0, seen.output
    require_same_numbers(seen, calm)
    last = pids_at_the_end(seen)
    assert len(last) == 2  # with three, eight replicas cannot be shared out
    assert last < set(before.values()) - {before[0]}
    assert "was killed (SIGKILL): the others continue." in seen.output
    starts = read_run(tmp_path)
    assert len(starts) == 1
    require_explained_time(starts, 1)
    causes = [x.text for x in diagnose(starts).causes]
    assert any("process 0 was lost" in x and "the others continued" in x for x in causes), causes


@pytest.mark.slow
def test_a_new_process_joins_between_two_steps(calm, tmp_path):
    env = {"ALONE_PAUSE_S": "0.5"}  # until the new one has come
    with Run(tmp_path, *TWO, "--restarts", "1", env=env) as run:
        run.wait_for_step(10, of_all=True)
        run.signal(1, signal.SIGKILL)
        seen = run.wait()
    assert seen.code == 0, seen.output
    require_same_numbers(seen, calm)
    counts = [x["processes"] for x in seen.lines]
    assert [n for n, before in zip(counts, [0, *counts], strict=False) if n != before] == [2, 1, 2]
    # It joined between two steps: none was repeated.
    steps = [x["step"] for x in seen.lines if x["generation"] >= 2 and x["rank"] == 0]
    assert len(steps) == len(set(steps))


@pytest.mark.slow
@pytest.mark.parametrize("spares", ["0", "1"])
def test_programs_restart_in_their_processes_if_jax_cannot(spares, calm, tmp_path):
    """For devices that are released only when a program ends."""
    with Run(tmp_path, *TWO, "--spares", spares, env={"IN_PROCESS": "0"}) as run:
        run.wait_for_step(10, of_all=True)
        before = run.pids()
        run.signal(0, signal.SIGKILL)
        since = time.time()
        seen = run.wait()
    assert seen.code == 0, seen.output
    require_same_numbers(seen, calm)
    last = pids_at_the_end(seen)
    assert len(last) == (2 if spares == "1" else 1)
    assert last & set(before.values()) == {before[1]}
    print("seconds to a new step:", seen.seconds_to_new_step(since))
    assert "continue from commit" in seen.output


@pytest.mark.slow
def test_the_time_of_restarted_programs_is_explained(tmp_path):
    env = {"IN_PROCESS": "0", "TPUDIST_GOODPUT": str(tmp_path)}
    with Run(tmp_path, *TWO, env=env) as run:
        run.wait_for_step(10, of_all=True)
        pids = run.pids()
        run.signal(1, signal.SIGKILL)
        seen = run.wait()
    assert seen.code == 0, seen.output
    assert sorted(seen.losses()) == list(range(1, STEPS + 1))
    assert pids_at_the_end(seen) == {pids[0]}
    starts = read_run(tmp_path)
    assert len(starts) == 2
    require_explained_time(starts, 0)
    causes = [x.text for x in diagnose(starts).causes]
    assert any("process 1 was lost" in x and "all processes were restarted" in x for x in causes), (
        causes
    )


@pytest.mark.slow
# Not slow, though it takes seconds: the quick tests, too, have a run that loses processes.
def test_sigterm_removes_one_process_between_two_steps(calm, tmp_path):
    """First a spare replaces a killed process, and then one process receives SIGTERM."""
    with Run(tmp_path, *TWO, "--spares", "1", env={"PAUSE_S": "0.1"}) as run:
        run.wait_for_step(8, of_all=True)
        before = run.pids()
        run.signal(1, signal.SIGKILL)
        run.wait_for(lambda: run.pids().get(1, before[1]) != before[1], "spare")
        run.wait_for_step(12, of_all=True)
        with_spare = run.pids()
        pid = run.signal(1, signal.SIGTERM)
        run.wait_for(lambda: not is_running(pid), "end of the process")
        seen = run.wait()
    assert seen.code == 0, seen.output
    require_same_numbers(seen, calm)
    assert "process 2 received a request to end. It leaves after this step." in seen.output
    assert len(with_spare) == 2
    assert with_spare[0] == before[0]
    assert pids_at_the_end(seen) == {before[0]}
    newest = max(x["generation"] for x in seen.lines)
    steps = [x["step"] for x in seen.lines if x["rank"] == 0 and x["generation"] >= newest - 1]
    assert len(steps) == len(set(steps))  # no step was repeated when it left


@pytest.mark.slow
def test_sigterm_of_all_saves_the_step_and_a_new_run_resumes(calm, tmp_path):
    env = {"CHECKPOINTS": str(tmp_path / "checkpoints")}
    with Run(tmp_path / "first", *TWO, env=env) as run:
        run.wait_for_step(10, of_all=True)
        run.process.send_signal(signal.SIGTERM)
        first = run.wait()
    assert first.code == 143, first.output
    one = ("-n", "1", "--devices-per-process", "4")
    with Run(tmp_path / "second", *one, env=env) as run:
        second = run.wait()
    assert second.code == 0, second.output
    both = first.losses() | second.losses()
    assert both == calm.losses()
    assert min(second.losses()) == max(first.losses()) + 1


@pytest.mark.slow
def test_an_error_of_the_program_ends_all_processes(tmp_path):
    env = {"FAULT": '{"kind": "raise", "process": 1, "step": 12}'}
    with Run(tmp_path, *TWO, env=env) as run:
        run.wait_for_step(12)
        began = time.monotonic()
        seen = run.wait()
    assert time.monotonic() - began < 40
    assert seen.code == 1, seen.output
    assert "[1] ValueError: no such thing" in seen.output
    assert "[0] ValueError: no such thing" in seen.output
    assert "an error of the program, so a restart would fail again" in seen.output


@pytest.mark.slow
def test_sys_exit_in_one_process_is_named_by_the_others(tmp_path):
    env = {"FAULT": '{"kind": "leave", "process": 1, "step": 12}'}
    with Run(tmp_path, *TWO, env=env) as run:
        seen = run.wait()
    assert seen.code in (1, 3), seen.output
    assert "shared call(s), but process" in seen.output


@pytest.mark.slow
def test_the_death_of_the_supervisor_ends_its_processes(tmp_path):
    with Run(tmp_path, *TWO) as run:
        run.wait_for_step(10, of_all=True)
        pids = run.pids()
        run.process.kill()
        began = time.monotonic()
        while any(map(is_running, pids.values())):
            assert time.monotonic() - began < 20
            time.sleep(0.01)


@pytest.mark.slow
def test_too_few_processes_give_up_with_a_reason(tmp_path):
    env = {"PAUSE_S": "0.1"}
    with Run(tmp_path, *TWO, env=env) as run:
        run.wait_for_step(10, of_all=True)
        for rank in range(2):
            run.signal(rank, signal.SIGKILL)
        seen = run.wait()
    assert seen.code in (70, 128 + 9), seen.output
    assert "giving up" in seen.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_process", "seed"),
    [*(("", i) for i in range(RUNS)), *(("0", i) for i in range(0, RUNS, 3))],
)
def test_a_fault_of_a_seed_is_survived_or_named(in_process, seed, calm, tmp_path):
    """Also by programs that start again in their processes (IN_PROCESS=0)."""
    fault, seen = run_with_fault(tmp_path, seed, IN_PROCESS=in_process)
    print(fault, "exit code", seen.code)
    require_outcome(fault, seen, calm)
    print("seconds to a new step:", [seen.seconds_to_new_step(x) for x in fault.times[-1:]])


@pytest.mark.slow
def test_a_missing_process_is_named_and_ends_the_wait(tmp_path):
    file = tmp_path / "late.py"
    file.write_text(
        "import json, os, time, tpudist\n"
        "if json.loads(os.environ['TF_CONFIG'])['task']['index'] == 1: time.sleep(1000)\n"
        "tpudist.experimental.survive(lambda survivor: None)\n"
    )
    env = {"TPUDIST_HANG_TIMEOUT_S": "7"}
    options = ("-n", "2", "--devices-per-process", "1")
    with Run(tmp_path, *options, env=env, program=file) as run:
        seen = run.wait()
    assert seen.code == 70, seen.output
    assert "waiting for process 1 to join generation 1: 5 s of 7." in seen.output
    assert "process 1 did not call tpudist.experimental.survive within 7 s" in seen.output


@pytest.mark.slow
def test_an_invalid_hang_timeout_is_wrong_use(tmp_path):
    with Run(tmp_path, *FOUR, env={"TPUDIST_HANG_TIMEOUT_S": "soon"}) as run:
        seen = run.wait()
    assert seen.code == 2
    assert "TPUDIST_HANG_TIMEOUT_S='soon' must be a number of seconds" in seen.output
