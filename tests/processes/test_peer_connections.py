"""Connections that notice the death of a process."""

import errno
import queue
import selectors
import socket
import threading
import time

import pytest

from tpudist.processes import host, peer_connections
from tpudist.processes.peer_connections import PeerConnections

HOST = "127.0.0.1"


@pytest.fixture
def lost():
    return queue.Queue()


@pytest.fixture
def first(lost):
    first = PeerConnections(0, lost.put)
    yield first
    first.close()


def test_a_killed_process_is_lost_and_one_that_exits_is_not(first, lost):
    address = first.listen(HOST)
    exiting, killed = PeerConnections(1, lost.put), PeerConnections(2, lost.put)
    exiting.connect(HOST, address)
    killed.connect(HOST, address)
    exiting.close()
    next(iter(killed._peers)).shutdown(socket.SHUT_RDWR)  # as the kernel does it
    assert lost.get(timeout=10) in (0, 2)  # both ends notice
    assert lost.get(timeout=10) in (0, 2)
    time.sleep(0.2)
    assert lost.empty()


def test_the_others_notice_the_end_of_process_0(first, lost):
    other = PeerConnections(1, lost.put)
    other.connect(HOST, first.listen(HOST))
    deadline = time.monotonic() + 10
    while not first._peers and time.monotonic() < deadline:
        time.sleep(0.01)
    first._closing.set()  # so that only the other reports
    next(iter(first._peers)).shutdown(socket.SHUT_RDWR)
    assert lost.get(timeout=10) == 0


def test_connections_with_a_wrong_secret_are_dropped(first, lost):
    port, _ = first.listen(HOST).split()
    for greeting in (b"1 no".ljust(64), b"x" * 64, b"1"):
        with socket.create_connection((HOST, int(port))) as stranger:
            stranger.sendall(greeting)
    other = PeerConnections(3, lost.put)
    other.connect(HOST, f"{port} {first._secret}")
    next(iter(other._peers)).shutdown(socket.SHUT_RDWR)
    assert {lost.get(timeout=10), lost.get(timeout=10)} == {0, 3}
    assert lost.empty()


def test_listening_at_an_address_of_another_host_raises(first):
    with pytest.raises(OSError, match=r"assign|address"):
        first.listen("192.0.2.1")


def count_threads(before):
    started = set(threading.enumerate()) - before
    return sum(x.name == peer_connections._THREAD for x in started)


def test_one_thread_serves_all_connections(first, lost):
    """Thousands of threads of process 0 would need memory, and Python's lock, next to the steps."""
    before = set(threading.enumerate())
    address = first.listen(HOST)
    assert count_threads(before) == 1
    others = [PeerConnections(i, lambda *_: None) for i in range(1, 33)]
    for other in others:
        other.connect(HOST, address)
    deadline = time.monotonic() + 10
    while len(first._peers) < 32 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(first._peers.values()) == list(range(1, 33))
    assert count_threads(before) == 1 + 32  # one of each other "process"
    for other in others[1:]:
        other.close()
    next(iter(others[0]._peers)).shutdown(socket.SHUT_RDWR)
    assert lost.get(timeout=10) == 1
    time.sleep(0.2)
    assert lost.empty()
    assert not first._peers


def test_a_silent_stranger_is_dropped_and_stops_nobody(first, lost, monkeypatch):
    monkeypatch.setattr(peer_connections, "_CONNECT_S", 0.2)
    port, _ = first.listen(HOST).split()
    with socket.create_connection((HOST, int(port))) as stranger:
        stranger.sendall(b"1 ")
        other = PeerConnections(2, lost.put)
        other.connect(HOST, f"{port} {first._secret}")
        stranger.settimeout(10)
        assert stranger.recv(64) == b"E"  # else a peer with a slow link would report a loss
    time.sleep(0.6)  # of a beat
    assert other.silence_s() < 0.6 + 0.5
    other.close()
    time.sleep(0.2)
    assert lost.empty()


def test_a_peer_that_process_0_cannot_serve_is_not_lost(first, lost, monkeypatch):
    class FullSelector(selectors.DefaultSelector):
        def register(self, fileobj, events, data=None):
            if not self.get_map():
                return super().register(fileobj, events, data)
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(host.Host, "selector", lambda self: FullSelector())
    other = PeerConnections(1, lost.put)
    other.connect(HOST, first.listen(HOST))
    deadline = time.monotonic() + 10
    while other._peers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not other._peers
    assert other.silence_s() == 0.0
    assert lost.empty()
    assert not first._greetings


def test_process_0_is_heard(first):
    other = PeerConnections(1, lambda *_: None)
    assert other.silence_s() == 0.0
    other.connect(HOST, first.listen(HOST))
    connected_s = other._heard_s
    deadline = time.monotonic() + 10
    while other._heard_s == connected_s and time.monotonic() < deadline:
        time.sleep(0.01)
    assert other._heard_s > connected_s
    other.close()
