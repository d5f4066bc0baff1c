"""The lines that processes write to each other when they meet: each is one object of JSON."""

import json
import os
import socket
import time
from typing import Any

import jax

from tpudist.xla import versions

MAX_BYTES = 4096
"""The longest line."""


def encode(x: dict[str, Any]) -> bytes:
    """Returns the line of an object."""
    return json.dumps(x).encode() + b"\n"


def parse(text: bytes) -> dict[str, Any]:
    """Returns the object of a line; an empty one if it is not such a line."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return {}


def hello() -> bytes:
    """Returns the first line of process 0, which no other program at its port sends."""
    return encode({"tpudist": versions.version_of("tpudist")})


def is_greeting(text: bytes | None) -> bool:
    """Whether a line is a greeting, and not an echo of what this process has said."""
    found = {} if text is None else parse(text)
    return "tpudist" in found and "index" not in found


def describe_self(num_processes: int, index: int) -> dict[str, Any]:
    """Returns what a process says of itself."""
    return {
        "tpudist": versions.version_of("tpudist"),
        "jax": jax.__version__,
        "count": num_processes,
        "index": index,
        "who": f"{socket.gethostname()}, process id {os.getpid()}",
    }


class LineReader:
    """Reads the lines of a connection."""

    def __init__(self, line: socket.socket):
        """Of a connection, of which nothing has been read."""
        self._line = line
        self._text = b""

    def read(self, deadline: float) -> bytes | None:
        """Returns the next line, None if it has not come by `deadline`, or b"" at the end.

        Text that does not start a line of ours is returned at once.
        """
        while b"\n" not in self._text:
            if self._text and not self._text.startswith(b"{"):
                return self._text
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                part = self._line.recv(MAX_BYTES)
            except TimeoutError:
                return None
            self._text += part
            if not part or len(self._text) > MAX_BYTES:
                return self._text
        found, _, self._text = self._text.partition(b"\n")
        return found
