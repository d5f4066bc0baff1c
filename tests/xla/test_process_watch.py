"""Processes that part: each ends within seconds, with a message that names who and what."""

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
DIFFER = "The processes do different things at call"
ENDED = "call(s) of what the processes do together, and process"
# What each program does after that, and what each of two processes says, or that it says nothing.
CASES = {
    "fewer steps, process 1": ("[run() for _ in range(5 - 2 * me)]", 1, ENDED, ENDED),
    "fewer steps, process 0": ("[run() for _ in range(3 + 2 * me)]", 1, ENDED, ENDED),
    "another order": (
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
        "Process 1 has failed",
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
        "Process 1 has ended without a word",
        "",
    ),
    "SIGKILL of process 0": (
        LOOP.format("if not me and i == 40: os.kill(os.getpid(), 9)"),
        75,
        "",
        "Process 0 has ended without a word",
    ),
    "os._exit of process 1": (
        "time.sleep(1)\nif me: os._exit(75)\ntime.sleep(60)",
        75,
        "Process 1 has ended without a word",
        "",
    ),
}


QUICK = ("another order", "an exception in process 1", "SIGKILL of process 0")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in CASES],
)
def test_all_end_within_seconds_and_say_why(name):
    more, exit_code, *said = CASES[name]
    program = "\n".join([*(line[4:] for line in PROGRAM.splitlines()), *more.splitlines()])
    with start_processes(program, devices_per_process=2) as running:
        for index in (0, 1):
            running.wait_until_said(index, "ready")
        start = time.monotonic()
        finished = running.wait(60, exit_codes=(exit_code, -9))
        seconds = time.monotonic() - start
    for one, words in zip(finished, said, strict=True):
        assert words in one.stderr
        assert one.exit_code == exit_code or not words
    if name in QUICK[:2]:  # the others are shown where they were
        assert any("was at:\n  File" in one.stderr for one in finished)
    assert seconds < 20  # about 3; on a busy machine as well


@pytest.mark.slow
def test_processes_that_do_the_same_end_well_whoever_is_first():
    program = PROGRAM + "    time.sleep(3 * me)\n    run()\n    time.sleep(3 - 3 * me)\n"
    with start_processes(program, devices_per_process=2) as running:
        finished = running.wait(60)
    assert [x.exit_code for x in finished] == [0, 0]
    assert not any("tpudist, process" in x.stderr for x in finished)
