import signal
import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest

import tpudist
from places import PROGRAMS
from tpudist.run.dispatch import interrupt_hold
from tpudist.run.dispatch.interrupt_hold import InterruptHold, interruptible


@pytest.fixture
def handled():
    """Signals that a handler of the user has received."""
    got: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_signal_waits_for_the_end_of_the_block(handled):
    handler = signal.getsignal(signal.SIGINT)
    with InterruptHold():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert handled == []
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            assert handled == [signal.SIGINT]
    assert handled == [signal.SIGINT] * 2  # two pending signals count as one
    assert signal.getsignal(signal.SIGINT) is handler


class Alarm(Exception):
    pass


def raise_in_a_hold(numbers, handled):
    with InterruptHold():
        for number in numbers:
            signal.raise_signal(number)
        handled.append(0)


def test_every_handler_that_may_raise_is_delayed_and_called_even_if_another_raises(handled):
    numbers = [signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1]

    def ring(number, frame):
        handled.append(number)
        raise Alarm(number)

    before = [signal.signal(number, ring) for number in numbers]
    try:
        with pytest.raises(Alarm):
            raise_in_a_hold((signal.SIGUSR1, signal.SIGINT, signal.SIGALRM), handled)
        assert handled == [0, signal.SIGUSR1, signal.SIGINT, signal.SIGALRM]
        assert [signal.getsignal(number) for number in numbers] == [ring] * 3
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_signal_is_kept_if_another_handler_raises_on_entry(handled, monkeypatch):
    """One signal is pending already, and the handler of the other is not replaced yet."""

    def ring(number, frame):
        raise Alarm

    def set_handler(number, handler):
        if number == signal.SIGTERM and handler is not ring:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        return signal.signal(number, handler)

    before = signal.signal(signal.SIGTERM, ring)
    monkeypatch.setattr(interrupt_hold, "_setsignal", set_handler)
    try:
        with pytest.raises(Alarm), InterruptHold():
            handled.append(0)
        assert handled == [signal.SIGINT]
        assert signal.getsignal(signal.SIGTERM) is ring
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_is_set_later_is_noticed(handled):
    with InterruptHold():
        pass
    before = signal.signal(signal.SIGUSR2, lambda number, frame: handled.append(number))
    try:
        with InterruptHold():
            signal.raise_signal(signal.SIGUSR2)
            assert handled == []
        assert handled == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def fail_when_interrupted():
    with InterruptHold():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("meanwhile")


def test_an_exception_in_the_block_is_the_cause_of_the_interrupt():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            fail_when_interrupted()
        assert str(caught.value.__context__) == "meanwhile"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_not_a_python_function_stays(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with InterruptHold():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_not_delay_signals(handled):
    handler, seen = signal.getsignal(signal.SIGINT), []

    def hold():
        with InterruptHold():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_tracing_is_interrupted_at_once():
    """Tracing may take minutes, and nothing has been overwritten yet."""
    strategy = tpudist.OneDeviceStrategy("cpu:0")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    after = []

    def step(x):
        signal.raise_signal(signal.SIGINT)
        after.append(x)
        return x

    try:
        with pytest.raises(KeyboardInterrupt):
            strategy.run(step, args=(jnp.ones(3),))
    finally:
        signal.signal(signal.SIGINT, before)
    assert after == []


WAYS = ("1:run", "2:run", "1:run_steps", "2:run_steps")


def check_interruptions(number, ways):
    program = str(PROGRAMS / "interrupted_program.py")
    done = subprocess.run(
        [sys.executable, program, str(number), *ways], capture_output=True, text=True, check=False
    )
    assert done.stdout == "".join(f"{way} {number} 0\n" for way in ways), done.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_interrupt_loses_no_state():
    """Model, optimizer and Variables survive an interrupt at any time, all at the same step."""
    check_interruptions(50, WAYS)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", WAYS)
def test_none_of_many_interrupts_loses_state(way):
    check_interruptions(400, [way])
