"""Boundaries between steps: which elements begin a step, and which callbacks run."""

import threading

import numpy as np
import pytest

import tpudist
from tpudist import step_boundaries


class Counted:
    """Counts the boundaries it comes to."""

    def __init__(self):
        self.number = 0
        step_boundaries.register(self.add)

    def add(self) -> None:
        self.number += 1


@pytest.fixture
def counted():
    yield (counted := Counted())
    step_boundaries.unregister(counted.add)


class Iterator:
    """Something that elements are taken from."""


def boundaries_of(turns: str, counted: Counted) -> list[bool]:
    """Polls one iterator per letter; returns which polls were boundaries."""
    iterators = {letter: Iterator() for letter in turns}
    found = []
    for letter in turns:
        before = counted.number
        step_boundaries.poll(iterators[letter])
        found.append(counted.number > before)
    return found


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("aaaa", "_aaa"),
        ("ababab", "__a_a_"),  # two elements per step: only the first begins one
        ("abcabc", "___a__"),
        ("aaaeeeaaa", "_aa_ee_aa"),  # an evaluation between steps
        ("aabaabaab", "_a_aa_aa_"),  # each element of `a` is a step; some steps take from `b`
    ],
)
def test_of_iterators_taken_from_in_turn_the_first_begins_a_step(turns, expected, counted):
    """Saving after the first of two elements has been taken would lose it."""
    found = boundaries_of(turns, counted)
    assert "".join(x if y else "_" for x, y in zip(turns, found, strict=True)) == expected


def test_elements_of_one_step_have_one_boundary(counted):
    a, b = Iterator(), Iterator()
    for _ in range(3):
        with step_boundaries.one_step():
            for iterator in (a, a, b):
                step_boundaries.poll(iterator)
            with step_boundaries.one_step():
                step_boundaries.poll(b)
    assert counted.number == 3


def test_without_an_iterator_it_is_a_boundary(counted):
    step_boundaries.poll()
    assert counted.number == 1


def test_other_threads_come_to_no_boundaries_of_this_one(counted):
    """Prefetching threads run ahead, each in its own time."""
    thread = threading.Thread(target=lambda: [step_boundaries.poll() for _ in range(3)])
    thread.start()
    thread.join()
    assert counted.number == 0


def test_what_acts_at_a_boundary_may_iterate_itself():
    polls = []

    def act():
        polls.append(1)
        before = step_boundaries.num_polls()
        step_boundaries.poll()
        assert step_boundaries.num_polls() == before

    step_boundaries.register(act)
    try:
        step_boundaries.poll()
    finally:
        step_boundaries.unregister(act)
    step_boundaries.poll()
    assert polls == [1]


def test_an_exception_ends_the_loop_and_the_next_poll_runs_callbacks_again():
    def act():
        raise KeyError("now")

    step_boundaries.register(act)
    try:
        for _ in range(2):
            with pytest.raises(KeyError, match="now"):
                step_boundaries.poll()
    finally:
        step_boundaries.unregister(act)


def test_a_deleted_object_gets_no_more_callbacks():
    calls = []

    class Listener:
        def hear(self):
            calls.append(1)

    listener = Listener()
    step_boundaries.register(listener.hear)
    step_boundaries.poll()
    del listener
    step_boundaries.poll()
    assert calls == [1]


def test_iterators_come_to_a_boundary_before_each_element(counted):
    strategy = tpudist.MirroredStrategy()
    dataset = tpudist.input.NumpyDataset(np.arange(64.0, dtype=np.float32)).batch(8)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    assert len(list(iterator)) == 8
    assert counted.number == 8  # not at the first, but before the end was found


def test_a_function_and_run_steps_come_to_one_for_all_they_take(counted):
    strategy = tpudist.MirroredStrategy()
    dataset = tpudist.input.NumpyDataset(np.arange(96.0, dtype=np.float32)).batch(8)
    dataset = strategy.experimental_distribute_dataset(dataset)
    a, b = iter(dataset), iter(dataset)

    @tpudist.function
    def step():
        return strategy.run(lambda x, y: x + y, args=(next(a), next(b)))

    for _ in range(3):
        step()
    assert counted.number == 3
    strategy.run_steps(lambda x: x + 1, a, 4)
    assert counted.number == 4
    strategy.run_steps(lambda x: x + 1, a, 4)
    assert counted.number == 5
