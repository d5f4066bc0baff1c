"""Lines that processes send each other at the rendezvous; each is one JSON object.

process 0 -> all     {"tpudist": "1.2.0"}                       greeting
process i -> 0       {"index": 3, "count": 8, "who": ..., ...}  introduction
process 0 -> all     {"ok": true}  or  {"error": "..."}         answer
"""

import json
import socket
from typing import Any, TypedDict

import jax

from tpudist.errors import StartupError
from tpudist.processes.host import this_host
from tpudist.xla import versions

MAX_BYTES = 4096
"""Length of the longest line."""


class Introduction(TypedDict):
    """Number, place and versions of a process.

    Attributes:
        tpudist: Version of tpudist.
        jax: Version of jax.
        count: Number of processes of the run, as this process knows it.
        index: Number of this process.
        who: Host and process id, for messages.
    """

    tpudist: str
    jax: str
    count: int
    index: int
    who: str


def encode(message: object) -> bytes:
    """Returns the line of a message."""
    return json.dumps(message).encode() + b"\n"


def parse(text: bytes) -> dict[str, Any]:
    """Returns the object of a line, or an empty one if it is not such a line."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return {}


def make_greeting() -> bytes:
    """Returns the first line of process 0, which no other program at its port sends."""
    return encode({"tpudist": versions.version_of("tpudist")})


def is_greeting(text: bytes | None) -> bool:
    """Whether a line is a greeting, and not an echo of this process's introduction."""
    message = {} if text is None else parse(text)
    return "tpudist" in message and "index" not in message


def introduce(num_processes: int, index: int) -> Introduction:
    """Returns the introduction of this process."""
    return {
        "tpudist": versions.version_of("tpudist"),
        "jax": jax.__version__,
        "count": num_processes,
        "index": index,
        "who": f"{this_host().name()}, process id {this_host().pid()}",
    }


def parse_introduction(text: bytes) -> Introduction | None:
    """Returns the introduction in a line, or None if another program wrote it."""
    message = parse(text)
    # `isinstance` would accept True, which is not a number.
    if type(message.get("index")) is not int or type(message.get("count")) is not int:
        return None
    if "who" not in message:
        return None
    return {
        "tpudist": message.get("tpudist", "unknown"),
        "jax": message.get("jax", "unknown"),
        "count": message["count"],
        "index": message["index"],
        "who": message["who"],
    }


def check_answer(answer: bytes, host: str, port: int) -> None:
    """Raises `StartupError` if process 0's answer is an error, or not an answer."""
    message = parse(answer)
    if not message:
        raise stranger_error(host, port)
    if "error" in message:
        raise StartupError(message["error"])


def stranger_error(host: str, port: int) -> StartupError:
    """Returns the error for a program at the address that is not process 0 of this run."""
    return StartupError(
        f"The program at {host}:{port} does not accept processes of a tpudist run: the run has "
        f"begun without this process (is its number used twice?), or another program uses the "
        f"port. Give each process its own number, end that program, or choose another port."
    )


class LineReader:
    """Reads the lines of a connection from which nothing has been read."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._text = b""

    def read(self, deadline: float) -> bytes | None:
        """Returns the next line, None if it has not come by `deadline`, or b"" at the end.

        Text that cannot begin a JSON object is returned at once.
        """
        while b"\n" not in self._text:
            if self._text and not self._text.startswith(b"{"):
                return self._text
            self._connection.settimeout(max(0.001, deadline - this_host().monotonic()))
            try:
                part = self._connection.recv(MAX_BYTES)
            except TimeoutError:
                return None
            self._text += part
            if not part or len(self._text) > MAX_BYTES:
                return self._text
        line, _, self._text = self._text.partition(b"\n")
        return line
