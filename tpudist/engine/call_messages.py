"""Messages between two processes that know one secret: values as pickles, arrays as they are.

A message is two numbers, of its arrays and of the bytes of the pickle; the sizes of the arrays; the
pickle; the arrays. Who does not know the secret is not heard: nothing of it is unpickled.
"""

from __future__ import annotations

import collections
import hmac
import io
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

_HEAD = struct.Struct("<II")
_MAX_CHUNKS = 512  # of one system call; systems take 1024
_NONCE_BYTES, _DIGEST_BYTES = 32, 32

Message = tuple[bytearray, list[np.ndarray]]
"""A pickle, and the arrays that it refers to."""


def dump(value: Any, make_pickler: Callable[..., Any]) -> list[Any]:
    """The chunks of a message.

    Args:
        value: What is sent.
        make_pickler: Such as `pickle.Pickler`.
    """
    arrays: list[Any] = []
    file = io.BytesIO()
    make_pickler(file, protocol=5, buffer_callback=arrays.append).dump(value)
    pickled, raw = file.getvalue(), [x.raw() for x in arrays]
    sizes = struct.pack(f"<{len(raw)}Q", *(x.nbytes for x in raw))
    return [_HEAD.pack(len(raw), len(pickled)) + sizes, pickled, *(x for x in raw if x.nbytes)]


def send(
    connection: socket.socket, chunks: Sequence[Any], patience_s: float | None = None
) -> list[memoryview]:
    """Sends chunks.

    Args:
        connection: To whom.
        chunks: Of messages.
        patience_s: How long the other side may take nothing; None for any time.

    Returns:
        What is left then.

    Raises:
        OSError: The other side is gone.
    """
    left = collections.deque(memoryview(x).cast("B") for x in chunks)
    flags = 0 if patience_s is None else socket.MSG_DONTWAIT
    while left:
        some = [left[i] for i in range(min(len(left), _MAX_CHUNKS))]
        try:
            count = connection.sendmsg(some, [], flags)
        except BlockingIOError:
            if not _wait(connection, select.POLLOUT, patience_s):
                break
            continue
        while count and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]
    return list(left)


class MessageReader:
    """Reads messages, also in several attempts."""

    def __init__(self, connection: socket.socket):
        """Of the other side of a connection."""
        self._connection = connection
        self._whole: collections.deque[Message] = collections.deque()
        self._parts = self._take_apart()
        self._left = next(self._parts)

    def read(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None if it has not come in time.

        Raises:
            OSError: The other side is gone.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._whole:
            if not len(self._left):
                self._left = next(self._parts)
                continue
            try:
                count = self._connection.recv_into(self._left, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                left_s = None if end_s is None else max(end_s - time.monotonic(), 0.0)
                if not _wait(self._connection, select.POLLIN, left_s):
                    return None
                continue
            if not count:
                raise ConnectionResetError("The other process has closed the connection.")
            self._left = self._left[count:]
        return self._whole.popleft()

    def _take_apart(self) -> Iterator[memoryview]:
        """What is to be filled next."""
        while True:
            yield memoryview(head := bytearray(_HEAD.size))
            num_arrays, size = _HEAD.unpack(head)
            yield memoryview(sizes := bytearray(8 * num_arrays))
            yield memoryview(pickled := bytearray(size))
            arrays = [np.empty(n, np.uint8) for n in struct.unpack(f"<{num_arrays}Q", sizes)]
            for array in arrays:
                yield memoryview(array)
            self._whole.append((pickled, arrays))
            yield memoryview(b"")


def _wait(connection: socket.socket, event: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    try:
        poll.register(connection, event)
    except ValueError:
        raise ConnectionAbortedError("The connection was closed here.") from None
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def shake_hands(connection: socket.socket, secret: bytes, *, has_called: bool) -> bool:
    """Finds out whether both sides know a secret, which is not sent.

    Args:
        connection: With a timeout.
        secret: Of both.
        has_called: Whether this is the side that has connected; the other one was called.

    Returns:
        Whether the other side knows it.

    Raises:
        OSError: It is gone, or takes too long.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(mine)
    theirs = _receive(connection, _NONCE_BYTES)
    nonces = mine + theirs if has_called else theirs + mine

    def digest(of_caller: bool) -> bytes:
        return hmac.digest(secret, (b"caller" if of_caller else b"called") + nonces, "sha256")

    if has_called:  # first, so that who was called says nothing to strangers
        connection.sendall(digest(True))
        return hmac.compare_digest(_receive(connection, _DIGEST_BYTES), digest(False))
    if not hmac.compare_digest(_receive(connection, _DIGEST_BYTES), digest(True)):
        return False
    connection.sendall(digest(False))
    return True


def _receive(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise ConnectionResetError("The other process has closed the connection.")
        found += more
    return found
