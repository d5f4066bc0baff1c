"""Messages between two processes of a run, by a connection of `multiprocessing`.

A message is a pickle, and the arrays in it, as they are: each goes as bytes of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import struct
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

SILENCE_S = 60.0
"""After which one who takes nothing of what it is sent cannot be reached."""
_HEAD = struct.Struct("<I")  # how many arrays follow the pickle

Message = tuple[memoryview, list[bytes]]
"""A pickle, and the arrays that it refers to."""


def dump(value: Any, make_pickler: Callable[..., Any]) -> list[Any]:
    """The parts of a message.

    Args:
        value: What is sent.
        make_pickler: Such as `pickle.Pickler`.
    """
    arrays: list[Any] = []
    file = io.BytesIO()
    file.write(_HEAD.pack(0))
    make_pickler(file, protocol=5, buffer_callback=arrays.append).dump(value)
    file.seek(0)
    file.write(_HEAD.pack(len(arrays)))
    return [file.getvalue(), *(x.raw() for x in arrays)]


def send(connection: Connection, parts: Sequence[Any]) -> None:
    """Sends a message.

    Raises:
        OSError: The other side is gone, or takes nothing for `SILENCE_S`.
    """
    for part in parts:
        connection.send_bytes(part)


def receive(connection: Connection) -> Message:
    """Waits for a message.

    Raises:
        OSError: The other side is gone.
        EOFError: It has closed the connection.
    """
    first = connection.recv_bytes()
    (num_arrays,) = _HEAD.unpack_from(first)
    return memoryview(first)[_HEAD.size :], [connection.recv_bytes() for _ in range(num_arrays)]


class Line:
    """The socket of a connection: small messages go at once, and silence has an end."""

    def __init__(self, connection: Connection):
        """Of a connection over TCP."""
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._limit(socket.SO_SNDTIMEO, SILENCE_S)

    def limit_silence(self, seconds: float | None) -> None:
        """After how many seconds without a byte reading is an error."""
        self._limit(socket.SO_RCVTIMEO, seconds or 0.0)

    def close(self) -> None:
        """Ends the connection, also under a thread that reads from it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _limit(self, option: int, seconds: float) -> None:
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, option, limit)
