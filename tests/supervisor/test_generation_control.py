"""The supervisor's decisions about generations, with members that only record their messages."""

import pytest

from tpudist.supervisor.generation_control import GenerationControl, Phase
from tpudist.supervisor.member import Member


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
    control.remove(lost)
    control.receive(first, report)
    control.receive(last, {"lost": 5, "why": "without a generation"})
    assert control.members == [first, last]
    assert [x.connection.is_closed for x in (first, lost, last)] == [False, True, False]
