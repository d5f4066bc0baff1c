"""Messages between two processes of a run, over a connection of `multiprocessing`.

A message is a pickle, followed by the bytes of its arrays, which are not copied into the pickle.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import struct
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pickle import PickleBuffer, Pickler

SILENCE_S = 60.0
"""Seconds without progress after which a receiver counts as unreachable. A sender may be silent for
any time; `Line.limit_silence` is for its first messages."""
_HEAD = struct.Struct("<I")  # number of arrays after the pickle

Message = tuple[memoryview, list[bytes]]
"""A pickle, and the arrays to which it refers."""


def dump(value: object, make_pickler: Callable[..., Pickler]) -> list[bytes | memoryview]:
    """Returns the parts of a message.

    Args:
        value: Value to send.
        make_pickler: Class such as `pickle.Pickler`.
    """
    arrays: list[PickleBuffer] = []
    file = io.BytesIO()
    file.write(_HEAD.pack(0))  # overwritten when the number of arrays is known
    make_pickler(file, protocol=5, buffer_callback=arrays.append).dump(value)
    file.seek(0)
    file.write(_HEAD.pack(len(arrays)))
    return [file.getvalue(), *(x.raw() for x in arrays)]


def send(connection: Connection, parts: Sequence[bytes | memoryview]) -> None:
    """Sends a message.

    Raises:
        OSError: If the other side is gone, or receives nothing for `SILENCE_S`.
    """
    for part in parts:
        connection.send_bytes(part)


def receive(connection: Connection) -> Message:
    """Waits for a message.

    Raises:
        OSError: If the other side is gone.
        EOFError: If it has closed the connection.
    """
    first = connection.recv_bytes()
    (num_arrays,) = _HEAD.unpack_from(first)
    return memoryview(first)[_HEAD.size :], [connection.recv_bytes() for _ in range(num_arrays)]


class Line:
    """The socket of a TCP connection: sends small messages at once, and limits silence."""

    def __init__(self, connection: Connection):
        # A second descriptor of the same socket, because `Connection` does not offer its options.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._limit(socket.SO_SNDTIMEO, SILENCE_S)

    def limit_silence(self, seconds: float | None) -> None:
        """Sets the seconds without a byte after which reading is an error; None for no limit."""
        self._limit(socket.SO_RCVTIMEO, seconds or 0.0)

    def close(self) -> None:
        """Closes the connection, even while a thread reads from it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _limit(self, option: int, seconds: float) -> None:
        # The socket options take a `struct timeval`: seconds and microseconds.
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, option, limit)
