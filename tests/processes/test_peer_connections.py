"""Connections that notice the death of a process."""

import queue
import socket
import time

import pytest

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
    killed._sockets[0].shutdown(socket.SHUT_RDWR)  # as the kernel does it
    assert lost.get(timeout=10) in (0, 2)  # both ends notice
    assert lost.get(timeout=10) in (0, 2)
    time.sleep(0.2)
    assert lost.empty()


def test_the_others_notice_the_end_of_process_0(first, lost):
    other = PeerConnections(1, lost.put)
    other.connect(HOST, first.listen(HOST))
    deadline = time.monotonic() + 10
    while not first._sockets and time.monotonic() < deadline:
        time.sleep(0.01)
    first._closing.set()  # so that only the other reports
    first._sockets[0].shutdown(socket.SHUT_RDWR)
    assert lost.get(timeout=10) == 0


def test_connections_with_a_wrong_secret_are_dropped(first, lost):
    port, _ = first.listen(HOST).split()
    for greeting in (b"1 no".ljust(64), b"x" * 64, b"1"):
        with socket.create_connection((HOST, int(port))) as stranger:
            stranger.sendall(greeting)
    other = PeerConnections(3, lost.put)
    other.connect(HOST, f"{port} {first._secret}")
    other._sockets[0].shutdown(socket.SHUT_RDWR)
    assert {lost.get(timeout=10), lost.get(timeout=10)} == {0, 3}
    assert lost.empty()


def test_listening_at_an_address_of_another_host_raises(first):
    with pytest.raises(OSError, match=r"assign|address"):
        first.listen("192.0.2.1")
