"""CallLine: ordered calls that run once, only from callers that know the secret."""

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


def test_replies_arrive_in_order_and_can_be_read_again(line, seen):
    replies = [line.call(i) for i in range(300)]
    assert get(line, replies[-1]) == 299
    assert [get(line, x) for x in replies] == list(range(300)) == seen
    assert get(line, replies[7]) == 7


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
@pytest.mark.parametrize("count", [1, 700])  # of arrays
def test_arrays_arrive_unchanged(line, size, count):
    size = size // count
    arrays = [np.arange(i, i + size, dtype=np.int32).reshape(-1, 1) for i in range(count)]
    found = get(line, line.call({"arrays": arrays, "order": np.asfortranarray(np.eye(3))}))
    np.testing.assert_array_equal(found["arrays"], arrays)
    assert found["order"].flags.f_contiguous


def test_calls_do_not_wait_for_unread_replies(line, seen):
    """Otherwise both sides would wait for each other if messages exceed the system's buffers."""
    big = np.zeros(4_000_000, np.uint8)
    replies = [line.call(big) for _ in range(8)]
    for reply in replies:
        assert len(get(line, reply)) == len(big)
    assert len(seen) == 8


def test_a_receiver_that_reads_nothing_is_unreachable(monkeypatch):
    """Like a stopped process: callers wait at most `SILENCE_S`."""
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
    """Returns the address of a listener that accepts a connection and never answers."""
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
    """A large local variable of a waiting caller."""


@pytest.mark.parametrize("when", ["it waits", "it calls"])
def test_a_broken_line_keeps_no_frames_of_callers(when, monkeypatch):
    """Otherwise a worker would keep the arguments of each function that a dead server failed."""

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


def test_callers_with_a_wrong_secret_are_rejected(listener, seen, monkeypatch):
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


def test_a_silent_connection_does_not_block_others(listener, monkeypatch):
    monkeypatch.setattr(call_listener, "HANDSHAKE_S", 0.3)
    with socket.create_connection(listener.address) as stranger:
        line = connect(listener)
        assert get(line, line.call(5)) == 5
        line.close()
        stranger.settimeout(20)
        while stranger.recv(100):
            pass


def test_a_listener_with_a_wrong_secret_is_rejected():
    with (
        silent_listener(b"another one") as address,
        pytest.raises(ConnectionRefusedError, match="has a different secret"),
    ):
        CallLine(address, SECRET, pickle.Pickler)


def test_pickle_errors_do_not_end_the_line(line):
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


def test_a_late_reply_arrives_after_a_timeout(line):
    reply = line.call(0.2)
    assert not line.wait(reply, 0.0)
    assert not line.wait(reply, 0.02)
    assert get(line, reply) == 0.2
    assert line.wait(reply, 0.0)


def test_the_end_of_the_line_is_raised_in_waiting_callers(line):
    reply, later = line.call(0.3), line.call(1)
    threading.Timer(0.05, line.close).start()
    for one in (reply, later, line.call(2)):
        with pytest.raises(ConnectionAbortedError):
            line.wait(one, 20.0)


def test_a_reply_that_cannot_be_stored_ends_the_line(line, monkeypatch):
    def receive(connection):
        raise MemoryError("too large")

    get(line, line.call(1))
    monkeypatch.setattr(call_line, "receive", receive)
    first, second = line.call(2), line.call(3)
    assert get(line, first) == 2  # for which the thread waited before
    with pytest.raises(ConnectionAbortedError, match="Cannot read a reply: MemoryError"):
        line.wait(second, 20.0)


def test_connecting_to_a_dead_listener_raises_an_error():
    with silent_listener() as address:
        line = CallLine(address, SECRET, pickle.Pickler)
    replies = [line.call(np.zeros(9_000_000, np.uint8)) for _ in range(3)]
    for reply in replies:
        with pytest.raises(ConnectionError):
            line.wait(reply, 20.0)
    line.close()


def test_many_threads_use_one_line(line):
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
