"""Connections by which a killed process is noticed."""

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


def test_who_ends_well_is_not_lost_and_who_does_not_is(first, lost):
    where = first.listen(HOST)
    well, killed = PeerConnections(1, lost.put), PeerConnections(2, lost.put)
    well.connect(HOST, where)
    killed.connect(HOST, where)
    well.close()
    killed._sockets[0].shutdown(socket.SHUT_RDWR)  # as the kernel does it
    assert lost.get(timeout=10) in (0, 2)  # its own end sees that, too
    assert lost.get(timeout=10) in (0, 2)
    time.sleep(0.2)
    assert lost.empty()


def test_the_end_of_the_first_process_is_seen_by_the_others(first, lost):
    other = PeerConnections(1, lost.put)
    other.connect(HOST, first.listen(HOST))
    deadline = time.monotonic() + 10
    while not first._sockets and time.monotonic() < deadline:
        time.sleep(0.01)
    first._closing.set()  # it does not look itself
    first._sockets[0].shutdown(socket.SHUT_RDWR)
    assert lost.get(timeout=10) == 0


def test_who_does_not_know_the_secret_is_nobody(first, lost):
    port, _ = first.listen(HOST).split()
    for greeting in (b"1 no".ljust(64), b"x" * 64, b"1"):
        with socket.create_connection((HOST, int(port))) as stranger:
            stranger.sendall(greeting)
    other = PeerConnections(3, lost.put)
    other.connect(HOST, f"{port} {first._secret}")
    other._sockets[0].shutdown(socket.SHUT_RDWR)
    assert {lost.get(timeout=10), lost.get(timeout=10)} == {0, 3}
    assert lost.empty()


def test_an_address_of_another_host_is_an_error(first):
    with pytest.raises(OSError, match=r"assign|address"):
        first.listen("192.0.2.1")
