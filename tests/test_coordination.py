"""What processes tell each other on the host, between two real processes."""

import jax
import pytest

from processes import run_processes
from tpudist.xla.coordination import Channel, reached_preemption


def test_one_process_exchanges_with_itself_without_a_service():
    channel = Channel("alone")
    assert [channel.exchange("a"), channel.exchange("b")] == [["a"], ["b"]]
    assert jax.process_count() == 1
    assert not reached_preemption(0)


@pytest.mark.multiprocess
def test_every_process_gets_all_texts_and_a_missing_one_is_named():
    """Reaches JAX's key-value store, whose place is private: this fails when JAX moves it."""
    results = run_processes(
        """
        import time
        import jax
        import tpudist
        from processes import report
        from tpudist.xla.coordination import Cancelled, Channel

        tpudist.emulate()
        tpudist.MultiWorkerMirroredStrategy()
        me = jax.process_index()
        channel = Channel("letters")
        rounds = [channel.exchange(f"{me}{letter}") for letter in "abc"]
        error = given_up = None
        if me == 0:
            try:
                Channel("nobody else").exchange("x", timeout_s=0.6)
            except RuntimeError as found:
                error = str(found)
            try:
                Channel("not wanted").exchange("x", cancelled=lambda: True)
            except Cancelled:
                given_up = True
        channel.exchange("end")
        report([rounds, error, given_up])
        """
    )
    everything = [["0a", "1a"], ["0b", "1b"], ["0c", "1c"]]
    (rounds, error, given_up), other = [result.result for result in results]
    assert rounds == everything
    assert other == [everything, None, None]
    assert "at 'nobody else', round 0, for process 1" in error
    assert given_up
