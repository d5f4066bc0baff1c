"""CallLine: calls of an actor in another process by a connection of one's own."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from tpudist.engine.call_messages import Message, MessageReader, dump, send, shake_hands

CONNECT_S = 5.0
"""How long it may take to connect."""
PATIENCE_S = 0.1
"""How long who calls waits while the other side takes nothing; then a thread does."""


class Reply:
    """What a call will give.

    Attributes:
        is_here: Whether it has come.
    """

    def __init__(self):
        """Not yet."""
        self.is_here = False
        self._message: Message | None = None
        self._value: Any = None

    def value(self, load: Callable[..., Any]) -> Any:
        """What has come, as `pickle.loads` makes it of bytes and buffers."""
        message = self._message
        if message is not None:
            pickled, arrays = message
            self._value = load(pickled, buffers=arrays)
            self._message = None
        return self._value

    def take(self, message: Message) -> None:
        """Has come."""
        self._message, self.is_here = message, True


class CallLine:
    """Calls go out in their order, and replies come back in it.

    Several threads may call and wait. Who waits reads; so there is no thread of its own, but for
    one while the other side does not take what was sent.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, make_pickler: Callable[..., Any]):
        """Connects.

        Args:
            address: Of a `CallListener`.
            secret: That of its listener.
            make_pickler: See `call_messages.dump`.

        Raises:
            OSError: It does not answer, or knows another secret.
        """
        self._make_pickler = make_pickler
        self._socket = socket.create_connection(address, CONNECT_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if not shake_hands(self._socket, secret, has_called=True):
                raise ConnectionRefusedError(f"Who listens at {address} knows another secret.")
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise
        # Whoever forgets it ends it.
        self._ending = weakref.finalize(self, self._socket.close)
        self._reader = MessageReader(self._socket)
        self._sending = threading.Lock()
        self._backlog: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self._awaited: collections.deque[Reply] = collections.deque()
        self._is_read = False
        self._error: OSError | None = None

    def call(self, message: Any) -> Reply:
        """Sends a message; what will be answered.

        Raises:
            Exception: It cannot be pickled; nothing was sent then.
        """
        chunks, reply = dump(message, self._make_pickler), Reply()
        with self._sending:
            with self._changed:
                if self._error is not None:
                    return reply
                self._awaited.append(reply)
            if self._backlog:
                self._backlog.extend(map(bytes, chunks))
                return reply
            try:
                left = send(self._socket, chunks, PATIENCE_S)
            except OSError as error:
                self._end(error)
                return reply
            if left:  # copied: whom it belongs to may change it
                self._backlog.extend(map(bytes, left))
                threading.Thread(target=self._send_backlog, daemon=True).start()
        return reply

    def wait(self, reply: Reply, timeout_s: float | None = None) -> bool:
        """Waits for a reply; whether it has come in time.

        Raises:
            OSError: The other side is gone.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not reply.is_here:
                if self._error is not None:
                    raise self._error
                left_s = None if end_s is None else max(end_s - time.monotonic(), 0.0)
                if self._is_read:  # by another thread, which tells
                    self._changed.wait(left_s)
                else:
                    self._read(left_s)
                if left_s == 0.0:
                    break
            return reply.is_here

    def close(self) -> None:
        """Ends it; who waits is told."""
        self._end(ConnectionAbortedError("The connection was closed here."))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who reads, which `close` does not
        self._ending()

    def _read(self, timeout_s: float | None) -> None:
        """Reads one message, without the condition that is held before and after."""
        self._is_read, message, error = True, None, None
        self._changed.release()
        try:
            message = self._reader.read(timeout_s)
        except OSError as raised:
            error = raised
        finally:
            self._changed.acquire()
            self._is_read = False
            if message is not None:
                self._awaited.popleft().take(message)
            if error is not None:
                self._error = self._error or error
            self._changed.notify_all()

    def _send_backlog(self) -> None:
        while True:
            with self._sending:
                if not self._backlog:
                    return
                chunk = self._backlog[0]
            try:
                send(self._socket, [chunk])
            except OSError as error:
                self._end(error)
                return
            with self._sending:
                self._backlog.popleft()

    def _end(self, error: OSError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
