"""Sockets, listeners and selectors of simulated hosts, as far as tpudist uses them.

The kernels of the hosts work even if a process is frozen: connections are accepted, data arrive,
and a connection ends when its process does. Buffers have no limit.
"""

import collections
import errno
import os
import selectors
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.network import Network
from simulation.scheduler import Scheduler, Waker, current_task

if TYPE_CHECKING:
    from simulation.process import Process

TCP = "tcp"
"""Purpose of the messages of sockets."""
_PACKET_BYTES = 66  # Ethernet, IP and TCP around the data
_SETTINGS = b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"  # the first frame of a gRPC server


def address_of(index: int) -> str:
    """Returns the address of a host."""
    return f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}"


def index_of(address: str) -> int:
    """Returns the host that has an address."""
    _, a, b, c = map(int, address.split("."))
    return a << 16 | b << 8 | c


class Sockets:
    """All sockets of a run.

    Args:
        scheduler: Time.
        network: Carries the data.
        is_up: Called with the number of a host; returns whether it answers.
    """

    def __init__(self, scheduler: Scheduler, network: Network, is_up: Callable[[int], bool]):
        self.scheduler, self.network, self.is_up = scheduler, network, is_up
        self._listeners: dict[tuple[int, int], SimulatedSocket] = {}
        self._grpc_ports: set[tuple[int, int]] = set()
        self._next_port = 40_000

    def listen(self, process: "Process", address: str, port: int) -> "SimulatedSocket":
        """Returns a socket that listens."""
        if index_of(address) != process.place:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        if not port:
            self._next_port += 1
            port = self._next_port
        place = process.place, port
        if place in self._listeners or place in self._grpc_ports:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = SimulatedSocket(self, process)
        listener.port = port
        self._listeners[place] = listener
        return listener

    def open_grpc_port(self, index: int, port: int) -> None:
        """Opens a port of JAX's service, which greets each connection with a frame."""
        self._grpc_ports.add((index, port))

    def close_grpc_port(self, index: int, port: int) -> None:
        """Closes it, as the kernel does when the process of the service has ended."""
        self._grpc_ports.discard((index, port))

    def forget(self, listener: "SimulatedSocket") -> None:
        """Stops listening."""
        assert listener.process is not None
        place = listener.process.place, listener.port
        if self._listeners.get(place) is listener:
            del self._listeners[place]

    def connect(
        self, process: "Process", address: str, port: int, timeout_s: float
    ) -> "SimulatedSocket":
        """Returns a connection, after one round trip."""
        near, target = SimulatedSocket(self, process), index_of(address)
        wake, answers = current_task().waker(), []

        def arrive(answer: str) -> None:
            if not answers:
                answers.append(answer)
                wake(0.0)

        def accept() -> None:
            if not self.is_up(target):
                return
            listener = self._listeners.get((target, port))
            if listener is None and (target, port) not in self._grpc_ports:
                self.network.send(
                    target, process.place, TCP, _PACKET_BYTES, lambda: arrive("refused")
                )
                return
            far = SimulatedSocket(self, listener.process if listener else None, target)
            near.peer, far.peer = far, near
            if listener:
                listener.accept_later(far)
            self.network.send(target, process.place, TCP, _PACKET_BYTES, lambda: arrive("accepted"))
            if listener is None:
                self.network.send(target, process.place, TCP, 80, lambda: near.deliver(_SETTINGS))

        self.network.send(process.place, target, TCP, _PACKET_BYTES, accept)
        process.wait(timeout_s)
        if not answers:
            answers.append("late")
            raise TimeoutError("timed out")
        if answers[0] == "refused":
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        process.sockets.add(near)
        return near


class SimulatedSocket(socket.socket):
    """One end of a connection, or a socket that listens.

    A subclass only for `isinstance`: it has no descriptor.
    """

    def __init__(self, sockets: Sockets, process: "Process | None", host: int | None = None):
        self.sockets, self.process = sockets, process
        self.host = process.place if process is not None else host
        self.peer: SimulatedSocket | None = None
        self.port = 0
        self._data, self._is_at_end = bytearray(), False
        self._error: OSError | None = None
        self._is_closed = False
        self._timeout_s: float | None = None
        self._accepted: collections.deque[SimulatedSocket] = collections.deque()
        self._readers: list[Waker] = []
        self.selector: Selector | None = None
        if process is not None:
            process.sockets.add(self)

    # From the network.

    def deliver(self, data: bytes) -> None:
        """Receives data; no data means the end."""
        if self._is_closed:
            return
        self._data += data
        self._is_at_end |= not data
        self._wake()

    def fail(self, error: OSError) -> None:
        """Ends the connection by an error, as when keepalive gets no answer."""
        if not self._is_closed and not self._is_at_end:
            self._error = error
            self._wake()

    def accept_later(self, far: "SimulatedSocket") -> None:
        """Adds a connection to the backlog."""
        self._accepted.append(far)
        self._wake()

    def is_readable(self) -> bool:
        """Whether a read does not wait."""
        return bool(self._data or self._is_at_end or self._error or self._accepted)

    def _wake(self) -> None:
        readers, self._readers = self._readers, []
        for wake in readers:
            wake(0.0)
        if self.selector is not None:
            self.selector.wake(self)

    def _wait_until(self, is_ready: Callable[[], bool]) -> None:
        assert self.process is not None
        end_s = None if self._timeout_s is None else self.sockets.scheduler.now_s + self._timeout_s
        while not is_ready():
            if self._is_closed:
                raise OSError(errno.EBADF, "Bad file descriptor")
            if self._error is not None:
                raise self._error
            left_s = None if end_s is None else end_s - self.sockets.scheduler.now_s
            if left_s is not None and left_s <= 0:
                raise BlockingIOError() if self._timeout_s == 0 else TimeoutError("timed out")
            self._readers.append(current_task().waker())
            self.process.wait(left_s)

    # From the program.

    def accept(self) -> tuple["SimulatedSocket", object]:
        """Returns the next connection."""
        self._wait_until(lambda: bool(self._accepted))
        return self._accepted.popleft(), None

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Returns data, or none at the end."""
        least = bufsize if flags & socket.MSG_WAITALL else 1
        self._wait_until(lambda: len(self._data) >= least or self._is_at_end)
        data = bytes(self._data[:bufsize])
        del self._data[:bufsize]
        return data

    def makefile(self, *_: Any, **__: Any) -> Any:
        """Returns a file that reads."""
        return _Reader(self)

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Sends data."""
        if self._is_closed or self._error is not None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self._send(bytes(data))

    def send(self, data: Any, flags: int = 0) -> int:
        """Sends data, all of it at once."""
        self.sendall(data)
        return len(data)

    def _send(self, data: bytes) -> None:
        peer = self.peer
        assert peer is not None
        assert self.host is not None
        assert peer.host is not None
        if not self.sockets.is_up(self.host):
            return  # a host without power sends no end of its connections
        size = _PACKET_BYTES + len(data)
        self.sockets.network.send(self.host, peer.host, TCP, size, lambda: peer.deliver(data))

    def shutdown(self, how: int) -> None:
        """Ends both directions."""
        if self.peer is not None and not self._is_closed:
            self._send(b"")
        self._is_at_end = True
        self._wake()

    def close(self) -> None:
        """Ends the connection, or stops listening."""
        if self._is_closed:
            return
        if self.peer is not None and not (self._is_at_end and self.peer._is_closed):
            self._send(b"")
        elif self.port:
            self.sockets.forget(self)
            for far in self._accepted:
                far.close()
        self._is_closed = True
        if self.process is not None:
            self.process.sockets.discard(self)
        self._wake()

    def settimeout(self, value: float | None) -> None:
        """Limits the next waits."""
        self._timeout_s = value

    def setblocking(self, flag: bool) -> None:
        """Sets whether the next calls wait."""
        self._timeout_s = None if flag else 0.0

    def setsockopt(self, *_: Any) -> None:
        """Keepalive is part of the model of splits, and Nagle's algorithm is not."""

    def getsockname(self) -> tuple[str, int]:
        """Returns address and port."""
        assert self.host is not None
        return address_of(self.host), self.port

    def fileno(self) -> int:
        """Returns -1: there is no descriptor."""
        return -1

    def __enter__(self) -> "SimulatedSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    __hash__ = object.__hash__


class _Reader:
    """The file of a socket, for reading."""

    def __init__(self, source: SimulatedSocket):
        self._source, self._text = source, bytearray()

    def readline(self) -> bytes:
        """Returns a line, or the rest at the end."""
        while b"\n" not in self._text and (data := self._source.recv(65536)):
            self._text += data
        end = self._text.find(b"\n") + 1 or len(self._text)
        return self._take(end)

    def read(self, count: int) -> bytes:
        """Returns `count` bytes, or fewer at the end."""
        while len(self._text) < count and (data := self._source.recv(65536)):
            self._text += data
        return self._take(count)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._text[:count])
        del self._text[:count]
        return taken


class Selector(selectors.BaseSelector):
    """Waits for any of several sockets."""

    def __init__(self, process: "Process"):
        self._process = process
        self._keys: dict[SimulatedSocket, selectors.SelectorKey] = {}
        self._ready: dict[SimulatedSocket, None] = {}
        self._waiting: Waker | None = None

    def wake(self, ready: SimulatedSocket) -> None:
        """Notices a socket that can be read."""
        self._ready[ready] = None
        if self._waiting is not None:
            self._waiting(0.0)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Adds a socket."""
        fileobj.selector = self
        self._keys[fileobj] = key = selectors.SelectorKey(fileobj, -1, events, data)
        if fileobj.is_readable():
            self._ready[fileobj] = None
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Removes a socket."""
        fileobj.selector = None
        self._ready.pop(fileobj, None)
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns the sockets that can be read."""
        if not self._find_ready():
            self._waiting = current_task().waker()
            try:
                self._process.wait(timeout)
            finally:
                self._waiting = None
        return [(self._keys[x], selectors.EVENT_READ) for x in self._find_ready()]

    def _find_ready(self) -> list[SimulatedSocket]:
        self._ready = {x: None for x in self._ready if x.is_readable()}
        return list(self._ready)

    def get_map(self) -> Any:
        """Returns the sockets."""
        return {x: key for x, key in self._keys.items()}

    def close(self) -> None:
        """Forgets all sockets."""
        for known in list(self._keys):
            self.unregister(known)
