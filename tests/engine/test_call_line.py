"""Calls by a connection of one's own: in their order, once, and only of who knows the secret."""

import contextlib
import gc
import pickle
import socket
import struct
import threading
import time
import weakref
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener

import numpy as np
import pytest

from tpudist.engine import call_line, call_listener, call_messages
from tpudist.engine.call_line import CallLine
from tpudist.engine.call_listener import CallListener

SECRET = b"of both"


def listen(answer, secret=SECRET):
    return CallListener("127.0.0.1", secret, answer, repr, pickle.loads, pickle.Pickler)


def connect(listener, secret=SECRET):
    return CallLine(listener.address, secret, pickle.Pickler)


def get(line, reply, timeout_s=20.0):
    assert line.wait(reply, timeout_s)
    return reply.value(pickle.loads)


@pytest.fixture
def seen():
    return []


@pytest.fixture
def listener(seen):
    def answer(message):
        seen.append(message)
        if callable(message):
            return message()
        if isinstance(message, float):
            time.sleep(message)
        return message

    return listen(answer)


@pytest.fixture
def line(listener):
    made = connect(listener)
    yield made
    made.close()


def test_replies_come_in_the_order_of_the_calls_and_as_often_as_one_asks(line, seen):
    replies = [line.call(i) for i in range(300)]
    assert get(line, replies[-1]) == 299
    assert [get(line, x) for x in replies] == list(range(300)) == seen
    assert get(line, replies[7]) == 7


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
@pytest.mark.parametrize("count", [1, 700])  # of arrays
def test_arrays_come_as_they_were(line, size, count):
    size = size // count
    arrays = [np.arange(i, i + size, dtype=np.int32).reshape(-1, 1) for i in range(count)]
    found = get(line, line.call({"arrays": arrays, "order": np.asfortranarray(np.eye(3))}))
    np.testing.assert_array_equal(found["arrays"], arrays)
    assert found["order"].flags.f_contiguous


def test_calls_do_not_wait_for_replies_that_nobody_reads(line, seen):
    """Else both sides would wait for each other, with what is larger than the system's buffers."""
    big = np.zeros(4_000_000, np.uint8)
    replies = [line.call(big) for _ in range(8)]
    for reply in replies:
        assert len(get(line, reply)) == len(big)
    assert len(seen) == 8


def test_one_who_takes_nothing_cannot_be_reached(monkeypatch):
    """As a process that was stopped; who has called waits no longer than `SILENCE_S`."""
    monkeypatch.setattr(call_messages, "SILENCE_S", 0.2)
    with silent_listener() as address:
        line = CallLine(address, SECRET, pickle.Pickler)
        first, second = line.call(1), line.call(np.zeros(20_000_000, np.uint8))
        for reply in (first, second, line.call(2)):
            with pytest.raises(BlockingIOError):
                line.wait(reply, 20.0)
        line.close()


@contextlib.contextmanager
def silent_listener(secret=SECRET):
    """One that takes a connection, and then nothing."""
    listener, go_on = Listener(("127.0.0.1", 0), authkey=secret), threading.Event()

    def serve():
        with contextlib.suppress(AuthenticationError, EOFError), listener.accept():
            go_on.wait(20)

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.address
    go_on.set()
    thread.join()
    listener.close()


class Big:
    """What the frame of one who waits has."""


@pytest.mark.parametrize("when", ["it waits", "it calls"])
def test_a_line_that_is_broken_keeps_nothing_of_who_was_told(when, monkeypatch):
    """Else a worker of a dead server would keep the arguments of each function that met it."""

    def broken(*_):
        raise BrokenPipeError("as if the other process were gone")

    def meet():
        held = Big()
        with pytest.raises(ConnectionError):
            line.wait(line.call(1))
        return weakref.ref(held)

    with silent_listener() as address:
        line = CallLine(address, SECRET, pickle.Pickler)
        if when == "it calls":
            monkeypatch.setattr(call_line, "send", broken)
        else:
            line.close()
        held = [meet(), meet()]
        line.close()
    gc.collect()
    assert [x() for x in held] == [None, None]


def test_who_does_not_know_the_secret_is_not_heard(listener, seen, monkeypatch):
    monkeypatch.setattr(call_listener, "HANDSHAKE_S", 0.3)
    with pytest.raises(ConnectionRefusedError, match="has a different secret"):
        connect(listener, b"another one")
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(struct.pack("!i", 30) + pickle.dumps("anything"))
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(100):
                pass
    assert seen == []


def test_one_who_says_nothing_holds_up_nobody(listener, monkeypatch):
    monkeypatch.setattr(call_listener, "HANDSHAKE_S", 0.3)
    with socket.create_connection(listener.address) as stranger:
        line = connect(listener)
        assert get(line, line.call(5)) == 5
        line.close()
        stranger.settimeout(20)
        while stranger.recv(100):
            pass


def test_a_listener_that_does_not_know_the_secret_is_not_called():
    with (
        silent_listener(b"another one") as address,
        pytest.raises(ConnectionRefusedError, match="has a different secret"),
    ):
        CallLine(address, SECRET, pickle.Pickler)


def test_what_cannot_be_sent_or_read_is_an_error_and_the_line_goes_on(line):
    with pytest.raises(Exception, match="lock"):
        line.call(threading.Lock())
    assert "cannot pickle '_thread.lock' object" in get(line, line.call(make_lock))
    assert "no such thing" in get(line, line.call(Unreadable()))
    assert get(line, line.call(3)) == 3


def make_lock():
    return threading.Lock()


def refuse():
    raise ValueError("no such thing")


class Unreadable:
    def __reduce__(self):
        return refuse, ()


def test_a_reply_that_takes_too_long_comes_later(line):
    reply = line.call(0.2)
    assert not line.wait(reply, 0.0)
    assert not line.wait(reply, 0.02)
    assert get(line, reply) == 0.2
    assert line.wait(reply, 0.0)


def test_who_waits_is_told_that_the_line_has_ended(line):
    reply, later = line.call(0.3), line.call(1)
    threading.Timer(0.05, line.close).start()
    for one in (reply, later, line.call(2)):
        with pytest.raises(ConnectionAbortedError):
            line.wait(one, 20.0)


def test_a_reply_that_cannot_be_taken_ends_the_line(line, monkeypatch):
    def receive(connection):
        raise MemoryError("too large")

    get(line, line.call(1))
    monkeypatch.setattr(call_line, "receive", receive)
    first, second = line.call(2), line.call(3)
    assert get(line, first) == 2  # for which the thread waited before
    with pytest.raises(ConnectionAbortedError, match="Cannot read a reply: MemoryError"):
        line.wait(second, 20.0)


def test_who_is_called_may_be_gone():
    with silent_listener() as address:
        line = CallLine(address, SECRET, pickle.Pickler)
    replies = [line.call(np.zeros(9_000_000, np.uint8)) for _ in range(3)]
    for reply in replies:
        with pytest.raises(ConnectionError):
            line.wait(reply, 20.0)
    line.close()


def test_many_threads_call_and_wait(line):
    found = []

    def work(k):
        for i in range(100):
            found.append(get(line, line.call((k, i))))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(k, i) for k in range(8) for i in range(100)]
    for k in range(8):
        assert [i for other, i in found if other == k] == list(range(100))
