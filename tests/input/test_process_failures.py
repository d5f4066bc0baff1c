"""Two real processes with their own datasets, of which one fails, ends or is killed."""

import signal

import pytest

from processes import run_processes, start_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SETUP = """
    import json
    import os
    import jax
    import numpy as np
    import tpudist
    from processes import report, say
    tpudist.emulate()
    strategy = tpudist.MultiWorkerMirroredStrategy()
    me = jax.process_index()

    def total(x):
        return tpudist.get_replica_context().all_reduce("sum", x.sum())

    def loop(dataset):
        for number, x in enumerate(dataset):
            strategy.run(total, (x,)).block_until_ready()
            if number == 100:
                say("is running")
"""


def test_a_read_by_number_that_fails_is_named_in_all_processes():
    """No message is sent for its step, so the watch of the processes reports it."""
    program = (
        SETUP
        + """
    class Records:
        def __len__(self):
            return 100_000

        def __getitem__(self, index):
            if me and index >= 4000:
                raise OSError("disk on fire")
            return np.float32(index)

    loop(strategy.distribute_datasets_from_function(
        lambda _: tpudist.input.from_records(Records()).batch(2)))
    """
    )
    with start_processes(program, devices_per_process=2) as running:
        finished = running.wait(60, exit_codes=(1,))
    for process in finished:
        assert "OSError: disk on fire" in process.stderr
    assert "Process 1" in finished[0].stderr


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_process_is_noticed_between_two_rounds(index):
    program = (
        SETUP
        + """
    def batches():
        while True:
            yield np.ones(2, np.float32)

    loop(strategy.distribute_datasets_from_function(lambda _: batches))
    """
    )
    with start_processes(program, devices_per_process=2) as running:
        for i in (0, 1):
            running.wait_until_said(i, "is running")
        running.signal(index, signal.SIGKILL)
        finished = running.wait(60, exit_codes=(75, -9, -6))
    assert f"rocess {index}" in finished[1 - index].stderr


def test_one_process_may_ask_for_the_state_of_all():
    """The other one need not answer: its positions wait in the coordination service."""
    program = (
        SETUP
        + """
    def batches(context):
        class Batches:
            def __init__(self):
                self.number = 0
            def __iter__(self):
                return self
            def __next__(self):
                self.number += 1
                if self.number > 400 + 100 * me:
                    raise StopIteration
                return np.full(2, 1000 * me + self.number, np.float32)
            def get_state(self):
                return self.number
            def set_state(self, number):
                self.number = number
        return Batches()

    def ids(x):
        return strategy.gather(x, axis=0).tolist()

    iterator = iter(strategy.distribute_datasets_from_function(batches))
    states, taken = {}, []
    for number in range(250):
        if number in (1, 63, 64, 65, 170, 230) and not me:
            states[number] = iterator.get_state()
        taken.append(ids(next(iterator)))
    from tpudist.processes.coordination import Channel
    states = json.loads(Channel("states").combine(json.dumps(states), lambda texts: texts[0]))
    found = []
    for number, state in states.items():
        again = iter(strategy.distribute_datasets_from_function(batches))
        again.set_state(state)
        found.append([ids(x) for x in again] == taken[int(number):])
        assert again.get_state()["ended"]
    report([len(taken), found])
    """
    )
    results = [x.result for x in run_processes(program, devices_per_process=2)]
    assert results == [[250, [True] * 6]] * 2
