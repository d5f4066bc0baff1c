"""A generation that ends between two steps: no process waits for a step of another one."""

import threading

import pytest

from tpudist.preemption.survival.program_generation import ProgramGeneration
from tpudist.preemption.survival.survivor import Copies


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
