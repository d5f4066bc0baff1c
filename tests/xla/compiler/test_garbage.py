"""The garbage collector runs rarely during a trace, and as usual afterwards."""

import gc
import threading

import jax.numpy as jnp
import pytest

import tpudist
from tpudist.xla.compiler import garbage


@pytest.fixture(autouse=True)
def threshold():
    usual = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*usual)


def test_a_trace_raises_the_threshold_and_restores_it():
    seen = []

    def step(x):
        seen.append(gc.get_threshold())
        return x + 1

    strategy = tpudist.MirroredStrategy()
    strategy.run(step, args=(jnp.ones(2),))
    assert set(seen) == {(100_000, 10, 10)}
    assert gc.get_threshold() == (700, 10, 10)


def test_a_trace_that_fails_restores_the_threshold():
    def step(x):
        raise KeyError("no such key")

    with pytest.raises(KeyError):
        tpudist.MirroredStrategy().run(step, args=(jnp.ones(2),))
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_of_several_threads_restores_the_threshold():
    inside, leave = threading.Event(), threading.Event()

    def trace():
        with garbage.collect_rarely():
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=trace)
    with garbage.collect_rarely():
        other.start()
        inside.wait(10)
    assert gc.get_threshold()[0] == 100_000  # the other thread still traces
    leave.set()
    other.join()
    assert gc.get_threshold() == (700, 10, 10)


def test_the_thresholds_of_the_user_stay():
    gc.set_threshold(0)  # off
    with garbage.collect_rarely():
        assert gc.get_threshold()[0] == 0
    gc.set_threshold(10**6)
    with garbage.collect_rarely():
        assert gc.get_threshold()[0] == 10**6
    with garbage.collect_rarely():
        gc.set_threshold(5000, 10, 10)  # inside of a step
    assert gc.get_threshold() == (5000, 10, 10)
