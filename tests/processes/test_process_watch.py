"""Processes that differ, fail or stop: all end within seconds, and a message names the cause."""

import signal
import time

import pytest

from processes import start_processes

pytestmark = pytest.mark.multiprocess

PROGRAM = """
    import os
    import sys
    import time
    import numpy as np
    from processes import say
    from worker_setup import double, me, strategy, total

    ones = strategy.experimental_distribute_values_from_function(lambda _: np.ones(3, np.float32))

    def run(function=total):
        return np.asarray(strategy.run(function, (ones,)).addressable_data(0))

    run(), run(double)
    say("ready")
"""
LOOP = "for i in range(400):\n    {}\n    run()\n    time.sleep(0.02)"
DIFFER = "The processes differ at call"
ENDED = "shared call(s), but process"
# How each program continues, the exit code, and a part of the error output of each process.
CASES = {
    "fewer steps, process 1": ("[run() for _ in range(5 - 2 * me)]", 1, ENDED, ENDED),
    "fewer steps, process 0": ("[run() for _ in range(3 + 2 * me)]", 1, ENDED, ENDED),
    "another order": (
        "from tpudist.processes import process_watch\nprocess_watch.GRACE_S = 0.5\n"
        "for f in ((total, double), (double, total))[me]: strategy.run(f, (ones,))\ntime.sleep(20)",
        1,
        DIFFER,
        DIFFER,
    ),
    "a new program in one": (
        "strategy.run((total, lambda x: double(x) * 2)[me], (ones,))\ntime.sleep(20)",
        1,
        DIFFER,
        DIFFER,
    ),
    "a reduction in one": (
        "time.sleep(1)\nif me: strategy.reduce('sum', ones, axis=None)",
        1,
        "Strategy.reduce, for the first time",
        "Strategy.reduce, for the first time",
    ),
    "an exception in process 1": (
        LOOP.format("if me and i == 5: raise ValueError('no such thing')"),
        1,
        "Process 1 failed",
        "ValueError: no such thing",
    ),
    "an exception in process 0": (
        LOOP.format("if not me and i == 5: raise ValueError('no such thing')"),
        1,
        "ValueError: no such thing",
        "ValueError: no such thing",
    ),
    "sys.exit in process 1": (LOOP.format("if me and i == 5: sys.exit(3)"), 1, ENDED, ENDED),
    "Ctrl-C in process 1": (
        LOOP.format("if me and i == 5: os.kill(os.getpid(), 2)"),
        1,
        "KeyboardInterrupt",
        "KeyboardInterrupt",
    ),
    "SIGKILL of process 1": (
        LOOP.format("if me and i == 40: os.kill(os.getpid(), 9)"),
        75,
        "Process 1 ended without a message",
        "",
    ),
    "SIGKILL of process 0": (
        LOOP.format("if not me and i == 40: os.kill(os.getpid(), 9)"),
        75,
        "",
        "Process 0 ended without a message",
    ),
    "os._exit of process 1": (
        "time.sleep(1)\nif me: os._exit(75)\ntime.sleep(60)",
        75,
        "Process 1 ended without a message",
        "",
    ),
}


# test_process_judge has the limit itself; here it is shorter.
STOPPED_SOON = (
    "from tpudist.processes.judge import process_silence\nprocess_silence.STOPPED_S = 6.0\n"
)
SLEEP = LOOP.format("").replace("400", "4000")
AHEAD = "if me == {}: time.sleep(100)\nrun()\nrun()"


def start_loop(more, **options):
    program = "\n".join([*(line[4:] for line in PROGRAM.splitlines()), *more.splitlines()])
    return start_processes(program, **{"devices_per_process": 2} | options)


def wait_until_ready(running):
    for index in (0, 1):
        running.wait_until_said(index, "ready")


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_stopped_process_is_named_and_the_others_end(index):
    """The kernel of the same host reports the stop; on another host it would take longer."""
    with start_loop(STOPPED_SOON + SLEEP) as running:
        wait_until_ready(running)
        running.signal(index, signal.SIGSTOP)
        start, other = time.monotonic(), running.workers[1 - index]
        assert other.process.wait(60) == 75
        assert 5 < time.monotonic() - start < 45
        running.signal(index, signal.SIGCONT)  # now it notices that the others have gone
        finished = running.wait(60, exit_codes=(75, -6))
    stderr = finished[1 - index].stderr
    assert f"Process {index} (pid {running.workers[index].process.pid} on " in stderr
    assert "has not reported for 4 s: it was stopped by SIGSTOP or Ctrl-Z. After 6 s" in stderr
    assert "Restart all processes" in stderr
    assert "[tpudist p" in finished[index].stderr


@pytest.mark.slow
def test_a_process_that_was_stopped_for_a_while_continues():
    with start_loop(LOOP.format("").replace("400", "100")) as running:
        wait_until_ready(running)
        running.signal(1, signal.SIGSTOP)
        stderr, deadline = running.workers[0].folder / "stderr", time.monotonic() + 15
        while "Process 1 (pid" not in stderr.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        running.signal(1, signal.SIGCONT)
        finished = running.wait(60)
    assert "Process 1 (pid" in finished[0].stderr


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("devices", [1, 2])  # with one, the other process blocks in its dispatch
def test_a_hung_process_is_named_with_its_stack(index, devices):
    env = {"TPUDIST_HANG_TIMEOUT_S": "6"}
    with start_loop(AHEAD.format(index), env=env, devices_per_process=devices) as running:
        wait_until_ready(running)
        start = time.monotonic()
        finished = running.wait(60, exit_codes=(75,))
        assert time.monotonic() - start < 45
    assert f"Process {1 - index} has waited 4 s for process {index} (pid" in finished[0].stderr
    assert "to start Strategy.run of 'total' (worker_setup.py:" in finished[0].stderr
    assert "time.sleep(100)" in finished[0].stderr
    for process in finished:
        assert "Thread 0x" in process.stderr  # the stacks of all threads
        assert "Restart all processes" in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_sigterm_ends_a_program_that_does_not_poll(index):
    """JAX's own handler would only record it."""
    with start_loop(SLEEP) as running:
        wait_until_ready(running)
        start = time.monotonic()
        running.signal(index, signal.SIGTERM)
        finished = running.wait(60, exit_codes=(143,))
        assert time.monotonic() - start < 45
    assert "SIGTERM. This program does not handle it" in finished[index].stderr
    assert f"Process {index} failed" in finished[1 - index].stderr


@pytest.mark.slow
def test_sigterm_is_the_reason_of_the_end_even_if_process_0_does_not_answer():
    with start_loop("time.sleep(100)") as running:
        wait_until_ready(running)
        running.signal(0, signal.SIGSTOP)
        start = time.monotonic()
        running.signal(1, signal.SIGTERM)
        assert running.workers[1].process.wait(60) == 143
        assert time.monotonic() - start < 30
        running.signal(0, signal.SIGKILL)


@pytest.mark.slow
def test_jax_handles_sigterm_if_the_program_polls():
    loop = """
from jax.experimental import multihost_utils
for i in range(2000):
    run()
    time.sleep(0.02)
    if i == 5:
        say("asking")
    if multihost_utils.reached_preemption_sync_point(i):
        print("at the point", flush=True)
        break
else:
    raise ValueError("never")
"""
    with start_loop(loop) as running:
        running.wait_until_said(1, "asking")
        running.signal(1, signal.SIGTERM)
        finished = running.wait(60)
    assert all("at the point" in x.stdout for x in finished)


QUICK = ("another order",)
ALWAYS = ("fewer steps, process 1",)
MARKS = dict.fromkeys(QUICK, ()) | dict.fromkeys(ALWAYS, pytest.mark.slow)
SOMETIMES = (pytest.mark.slow, pytest.mark.exhaustive)


@pytest.mark.parametrize("name", [pytest.param(x, marks=MARKS.get(x, SOMETIMES)) for x in CASES])
def test_all_processes_end_within_seconds_and_report_why(name):
    more, exit_code, *messages = CASES[name]
    with start_loop(more) as running:
        wait_until_ready(running)
        start = time.monotonic()
        finished = running.wait(60, exit_codes=(exit_code, -9))
        seconds = time.monotonic() - start
    for process, message in zip(finished, messages, strict=True):
        assert message in process.stderr
        assert process.exit_code == exit_code or not message
    if name in ("another order", "an exception in process 1"):  # the stack of the other
        assert any("was at:\n  File" in x.stderr for x in finished)
    assert seconds < 45  # about 3


@pytest.mark.slow
def test_equal_processes_exit_with_code_0_in_any_order():
    program = PROGRAM + "    time.sleep(me)\n    run()\n    time.sleep(1 - me)\n"
    with start_processes(program, devices_per_process=2) as running:
        finished = running.wait(60)
    assert [x.exit_code for x in finished] == [0, 0]
    assert not any("[tpudist p" in x.stderr for x in finished)
