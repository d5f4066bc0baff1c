"""How a generation ends between two steps: no process waits for a step of another one."""

import threading

from tpudist.preemption.survival.survival import _Generation


def test_it_is_said_at_once_where_a_process_is():
    """One that waits in a step for another one, which waits for this word, could not say it."""
    said = []
    generation = _Generation(3, 7, lambda outgoing: said.append(outgoing.message))
    assert not generation.is_last(8)
    generation.pause()
    assert said == [{"paused": 3, "commit": 8}]
    found = []
    program = threading.Thread(target=lambda: found.append(generation.is_last(9)))
    program.start()
    program.join(0.3)
    assert found == []  # nobody passes the next commit before it is known which is the last one
    generation.stop_at(10, ends_all=False)
    program.join(5)
    assert found == [False]
    assert generation.is_last(10)
    assert said == [{"paused": 3, "commit": 8}]


def test_before_the_first_commit_it_is_where_the_state_is():
    said = []
    generation = _Generation(3, 7, lambda outgoing: said.append(outgoing.message))
    generation.pause()
    assert said == [{"paused": 3, "commit": 7}]
    generation.end()
    assert not generation.is_last(8)  # nobody waits in a generation that has ended
