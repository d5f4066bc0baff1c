"""A generation that ends between two steps: no process waits for a step of another one."""

import dataclasses
import threading
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from tpudist.preemption.survival import held_error, supervised_process
from tpudist.preemption.survival.program_generation import ProgramGeneration
from tpudist.preemption.survival.supervised_process import SupervisedProcess
from tpudist.preemption.survival.survivor import Copies, Link, Survivor
from tpudist.processes import host_copies, json_lines


@pytest.fixture
def messages():
    return []


@pytest.fixture
def generation(messages):
    copies = Copies(None)
    yield ProgramGeneration(3, 7, messages.append, copies)
    copies.end(5)


def test_a_pause_reports_the_commit_at_once(generation, messages):
    """A process in a step that waits for others could not report at its next commit."""
    assert not generation.is_last(8)
    generation.pause()
    assert messages == [{"paused": 3, "commit": 8}]
    results = []
    program = threading.Thread(target=lambda: results.append(generation.is_last(9)))
    program.start()
    program.join(0.3)
    assert results == []  # no process passes the next commit before the last one is known
    generation.stop_at(10, ends_all=False)
    program.join(5)
    assert results == [False]
    assert generation.is_last(10)
    assert messages == [{"paused": 3, "commit": 8}]


def test_a_pause_before_the_first_commit_reports_the_restored_one(generation, messages):
    generation.pause()
    assert messages == [{"paused": 3, "commit": 7}]
    generation.end()
    assert not generation.is_last(8)  # nobody waits in a generation that has ended


def test_copies_that_the_host_does_not_keep_up_with_are_left_out(monkeypatch):
    """Each unfinished copy has the size of the state, on the devices."""
    may_finish, finish = threading.Event(), host_copies.finish
    monkeypatch.setattr(host_copies, "finish", lambda x: may_finish.wait(20) and finish(x))
    copies = Copies(None)
    for commit in range(1, 6):
        copies.begin(commit, tpudist.TrainState(w=jnp.full(3, commit)))
        assert copies._waiting.qsize() <= 1
    may_finish.set()
    newest = copies.end(20)
    assert newest.commit == 5
    np.testing.assert_array_equal(newest.arrays["w"], [5, 5, 5])


def test_a_copy_that_fails_does_not_end_the_copies(monkeypatch):
    was_called = threading.Event()

    def fail(copy):
        was_called.set()
        raise MemoryError

    copies = Copies(None)
    with monkeypatch.context() as patch:
        patch.setattr(host_copies, "finish", fail)
        copies.begin(1, tpudist.TrainState(w=jnp.ones(3)))
        assert was_called.wait(20)
        patch.setattr(host_copies, "finish", np.asarray)
        copies.begin(2, tpudist.TrainState(w=jnp.ones(3)))
        assert copies.end(20).commit == 2


def test_a_program_may_change_a_restored_array_in_place():
    """Else the copy would change, with which another process, or the next generation, begins."""
    copies = Copies(None)
    state = tpudist.TrainState(w=np.ones(2))
    copies.begin(1, state)
    newest = copies.end(20)
    fetched = dataclasses.replace(newest, arrays={k: v.copy() for k, v in newest.arrays.items()})
    fetched.arrays["w"].flags.writeable = False  # as another process has sent it
    for copy in (newest, fetched):
        copies = Copies(copy)
        assert Survivor(1, copies, 1, Link()).restore(state)
        state.w += 1.0
        np.testing.assert_array_equal(copy.arrays["w"], [1.0, 1.0])
        copies.end(20)


def test_other_events_are_handled_while_an_error_is_held_back(monkeypatch):
    """A process that is asked to end exits with 143, although its program has failed, too."""
    monkeypatch.setattr(held_error, "_HOLD_S", 0.2)
    monkeypatch.setattr(json_lines, "connect", MagicMock())
    monkeypatch.setattr(supervised_process, "Listener", MagicMock())
    process = SupervisedProcess(lambda survivor: None, 1, None, None, "host 1 secret 0")
    process._generation = generation = object()
    process._on_program_ended(supervised_process._ProgramEnded(generation, error=ValueError("a")))
    process._events.put("leave")
    assert process._next_event() == "leave"
    with pytest.raises(ValueError, match="a"):
        process._next_event()


@pytest.mark.parametrize("last", [jax.errors.JaxRuntimeError("lost"), ValueError("other")])
def test_errors_that_cause_each_other_are_searched_once(last):
    """`raise error from error` makes a cycle of one error."""
    first = ValueError("first")
    first.__cause__, last.__cause__ = last, first
    is_collective = isinstance(last, jax.errors.JaxRuntimeError)
    assert held_error._may_come_from_collective(first) == is_collective
    alone = ValueError("alone")
    alone.__cause__ = alone
    assert not held_error._may_come_from_collective(alone)


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"every": 1.5}, {"processes": ()}, {"processes": (1, 2.5)}]
)
def test_numbers_that_are_not_whole_are_rejected(options):
    with pytest.raises(ValueError, match="must be whole numbers of at least 1"):
        tpudist.experimental.survive(lambda survivor: None, **options)
    numbers = {"every": np.int64(2), "processes": np.array([1, 2])}
    assert tpudist.experimental.survive(lambda survivor: 5, **numbers) == 5
