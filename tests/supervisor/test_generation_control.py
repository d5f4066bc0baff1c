"""The supervisor's decisions about generations, with members that only record their messages."""

import pytest

from tpudist.supervisor.generation_control import MAX_WITHOUT_PROGRESS, GenerationControl, Phase
from tpudist.supervisor.member import Member
from tpudist.xla import internals


class FakeConnection:
    """Records messages; its process is on another host, so closing it is all that ends it."""

    def __init__(self):
        self.messages = []
        self.is_closed = False

    def send(self, **message):
        self.messages.append(message)

    def close(self):
        self.is_closed = True


@pytest.fixture
def control():
    control = GenerationControl("127.0.0.1", 3, lambda line: None)
    for index in range(3):
        place = f"elsewhere {index} host"
        control.add(Member(FakeConnection(), index, place, ("127.0.0.1", 1), None))
    control.phase = Phase.RUNNING
    return control


def test_a_repeated_loss_ends_no_process_of_the_next_generation(control):
    """The watch repeats a loss until its process has left the generation."""
    first, lost, last = control.members
    report = {"lost": 1, "generation": 1, "why": "silent"}
    control.receive(first, report)
    control.receive(first, report)
    control.receive(last, {"lost": 5, "why": "without a generation"})
    assert control.members == [first, last]
    assert [x.connection.is_closed for x in (first, lost, last)] == [False, True, False]


def test_generations_without_a_commit_give_up(control, monkeypatch):
    monkeypatch.setattr(internals, "start_coordination_service", lambda address, count: object())
    for generation in range(2, 20):
        control.receive(control.members[0], {"failed": generation - 1, "why": "x"})
        for member in control.members:
            control.receive(member, {"ready": generation, "commit": 3 if generation > 2 else -1})
        if control.gave_up:
            break
    assert generation == 3 + MAX_WITHOUT_PROGRESS + 1  # the last commit was in generation 3
    assert "9 generations of processes in a row made no commit" in control.gave_up
