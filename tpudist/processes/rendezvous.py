"""The processes of a run meet before JAX connects them, to find out who is missing or does not fit.

JAX's own start-up waits for 300 s and does not say for whom, and a taken port, a second process of
the same number or another count end it by an abort, or not at all. So the first process listens at
its address first, the others tell it who they are, and when all have come they go on together.
"""

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from typing import Any

from tpudist.errors import StartupError
from tpudist.processes import meeting_lines
from tpudist.processes.meeting_lines import LineReader

_log = logging.getLogger("tpudist")

TIMEOUT_S = 300.0
RESOLVE_S = 10.0
"""For how long a name may be unknown: that of a pod is for some seconds."""
_REPORT_S = 5.0  # after which a wait is first told of; then after twice that time, and so on
_SLICE_S = 0.5
_SERVICE_S = 5.0
HOLDER_S = 2.0
"""Seconds for which process 0 waits for another program that has its port to say what it is."""
STRANGER_S = 4.0
"""Seconds until a listener that does not greet is another program: process 0 greets at once."""
LATE_S = 6.0
"""Seconds for which process 0 reports an error to processes that come late."""


def meet(address: str, num_processes: int, index: int, timeout_s: float = TIMEOUT_S) -> None:
    """Returns when all processes have come to `address`, and fit together.

    Args:
        address: `host:port` of the first process.
        num_processes: How many there are.
        index: Which of them this is.
        timeout_s: How long to wait for the others.

    Raises:
        ValueError: `address` is no address, or there is no such process.
        StartupError: The address cannot be used, a process is missing, or one does not fit: it has
            the number of another one, counts otherwise, or has other versions. In all processes
            that have come.
    """
    host, port = parse_address(address)
    if not 0 <= index < num_processes:
        raise ValueError(
            f"The process number {index} is invalid: with {num_processes} processes, the numbers "
            f"are 0 to {num_processes - 1}. Correct the number."
        )
    patience = _Patience(timeout_s)
    if index:
        _visit(host, port, num_processes, index, patience)
    else:
        _receive(host, port, num_processes, patience)


def parse_address(address: str) -> tuple[str, int]:
    """The host and the port of `host:port`.

    Raises:
        ValueError: It has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"The address of the first process is {address!r}. It must be host:port with a port "
            f"from 1 to 65535, such as '10.0.0.1:8476'."
        )
    return host.strip("[]"), int(port)


def problem_of_address(host: str, port: int) -> str:
    """Why the first process could not listen there now; "" if it could."""
    try:
        _listen(host, port).close()
    except StartupError as error:
        return str(error)
    return ""


class _Patience:
    """How long something may take, and when to tell of it."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._start = time.monotonic()
        self._next_report_s = _REPORT_S

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def is_over(self) -> bool:
        return self.waited_s >= self.timeout_s

    def report(self, what: str) -> None:
        """Tells of the wait, now and then."""
        if self.waited_s >= self._next_report_s:
            self._next_report_s *= 2
            _log.warning("%s: %.0f s of %g.", what, self.waited_s, self.timeout_s)


# The first process.


def _receive(host: str, port: int, num_processes: int, patience: _Patience) -> None:
    try:
        server = _listen(host, port)
    except StartupError as error:
        _ask_holder(host, port, num_processes)
        raise error
    with server, selectors.DefaultSelector() as selector:
        guests = _Guests(num_processes, f"{host}:{port}")
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        try:
            while guests.missing:
                for key, _ in selector.select(_SLICE_S):
                    if key.fileobj is server:
                        with contextlib.suppress(OSError):  # of one that has gone again
                            line, _ = server.accept()
                            line.setblocking(False)
                            guests.open(line)
                            selector.register(line, selectors.EVENT_READ)
                    elif not guests.read(key.fileobj):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
                who = _list(guests.missing)
                patience.report(f"Process 0 at {host}:{port} waits for {who} of {num_processes}")
                if patience.is_over:
                    raise StartupError(
                        f"Of {num_processes} processes, {who} did not connect to {host}:{port} "
                        f"within {patience.timeout_s:g} s. Check that it was started, that it "
                        f"uses this address, and that its host can reach this one."
                    )
            server.close()  # so that from now on only JAX's service answers there
            guests.answer({"ok": True})
        except StartupError as error:
            guests.answer({"error": str(error)})
            if not patience.is_over:
                _answer_late_ones(server, guests, str(error))
            raise
        finally:
            guests.close()


def _answer_late_ones(server: socket.socket, guests: "_Guests", problem: str) -> None:
    """Reports an error to the processes that have not come yet: they would wait for 300 s."""
    deadline = time.monotonic() + LATE_S
    if len(guests) < guests.num_expected:
        _log.warning(
            "The run cannot start. Notifying the other processes for %g s: %s", LATE_S, problem
        )
    server.settimeout(0.1)
    while len(guests) < guests.num_expected and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            line, _ = server.accept()
            guests.open(line)
            guests.answer({"error": problem}, [line])


def _ask_holder(host: str, port: int, num_processes: int) -> None:
    """Reports this process 0 to the program that has its port, if that is another process 0.

    Raises:
        StartupError: If it is; it has reported the error to all processes.
    """
    with contextlib.suppress(OSError):
        with socket.create_connection((host, port), timeout=_SLICE_S) as line:
            reader = LineReader(line)
            if meeting_lines.is_greeting(reader.read(time.monotonic() + HOLDER_S)):
                line.sendall(meeting_lines.encode(meeting_lines.describe_self(num_processes, 0)))
                if answer := reader.read(time.monotonic() + HOLDER_S):
                    _read_answer(answer, host, port)


class _Guests:
    """Who has come to the first process."""

    def __init__(self, num_processes: int, address: str):
        self._host = meeting_lines.describe_self(num_processes, 0)
        self._address = address
        self._texts: dict[socket.socket, bytes] = {}
        self._known: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
        self.num_expected = num_processes - 1

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def missing(self) -> list[int]:
        return [i for i in range(1, self._host["count"]) if i not in self._known]

    def open(self, line: socket.socket) -> None:
        self._texts[line] = b""
        with contextlib.suppress(OSError):  # `read` finds out that it has gone
            line.sendall(meeting_lines.hello())

    def read(self, line: socket.socket) -> bool:
        """Takes what has come; whether the guest stays."""
        try:
            found = line.recv(meeting_lines.MAX_BYTES)
        except OSError:
            found = b""
        self._texts[line] += found
        if not found or len(self._texts[line]) > meeting_lines.MAX_BYTES:
            del self._texts[line]
            self._known = {i: x for i, x in self._known.items() if x[0] is not line}
            return False
        if self._texts[line].endswith(b"\n"):
            said = meeting_lines.parse(self._texts[line])
            numbers = said.get("index"), said.get("count")
            if not all(type(x) is int for x in numbers) or "who" not in said:  # not of ours
                del self._texts[line]
                return False
            self._welcome(line, said)
        return True

    def _welcome(self, line: socket.socket, said: dict[str, Any]) -> None:
        index, host = said["index"], self._host
        self.num_expected = max(self.num_expected, said["count"] - 1)
        known = self._known.setdefault(index, (line, said))
        for name, what in (
            ("count", "number of processes"),
            ("jax", "version of jax"),
            ("tpudist", "version of tpudist"),
        ):
            if said.get(name) != host[name]:
                raise StartupError(
                    f"Process {index} ({said['who']}) has {what} {said.get(name)}, but process 0 "
                    f"({host['who']}) has {host[name]}. All processes of a run must have the same "
                    f"{what}."
                )
        if known[0] is not line or index == 0:
            other = host if index == 0 else known[1]
            self.num_expected += 1  # all numbers may come besides
            raise StartupError(
                f"Two processes have the number {index}: {other['who']}; {said['who']}. Give each "
                f"process its own number, from 0 to {host['count'] - 1}, such as the index of its "
                f"task in TF_CONFIG."
            )

    def answer(
        self, answer: dict[str, Any], lines: Collection[socket.socket] | None = None
    ) -> None:
        for line in self._texts if lines is None else lines:
            with contextlib.suppress(OSError):
                line.setblocking(True)
                line.settimeout(_SLICE_S)
                line.sendall(meeting_lines.encode(answer))

    def close(self) -> None:
        """After the others: whose side closes first, its port stays taken for a minute."""
        deadline = time.monotonic() + 2.0
        for line in self._texts:
            with contextlib.suppress(OSError):
                while time.monotonic() < deadline and line.recv(meeting_lines.MAX_BYTES):
                    pass
            line.close()


def _listen(host: str, port: int) -> socket.socket:
    problem: OSError | None = None
    for family, place in _resolve(host, port):
        try:
            return socket.create_server(place[:2], family=family, backlog=1024)
        except OSError as error:
            problem = error
    assert problem is not None, "a name has at least one address"
    remedy = {
        errno.EADDRINUSE: "Another program uses the port, perhaps an earlier run or a second "
        "process with the number 0. End that program, or choose another port.",
        errno.EADDRNOTAVAIL: f"This host ({socket.gethostname()}) does not have this address. "
        f"Start process 0 on the host that the address names.",
        errno.EACCES: "Ports below 1024 are reserved for the system. Choose another port.",
    }.get(problem.errno or 0, "Choose another address.")
    raise StartupError(
        f"Process 0 cannot listen at {host}:{port} ({os.strerror(problem.errno or 0)}). {remedy}"
    ) from problem


def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    """The addresses of a host, which may be unknown for a while."""
    start = time.monotonic()
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return [(family, place) for family, *_, place in found]
        except (OSError, UnicodeError) as error:
            if time.monotonic() - start > RESOLVE_S - _SLICE_S:
                raise StartupError(
                    f"The host {host!r} of the first process is unknown on {socket.gethostname()} "
                    f"({error}). Use a name that all hosts know, or an IP address."
                ) from error
            time.sleep(_SLICE_S)


# The other processes.


def _visit(host: str, port: int, num_processes: int, index: int, patience: _Patience) -> None:
    said = meeting_lines.encode(meeting_lines.describe_self(num_processes, index))
    place = f"process 0 at {host}:{port}"
    _resolve(host, port)
    problem = "no process listens there"
    stranger_since: float | None = None  # when something listened first that has not greeted
    while not patience.is_over:
        answer: bytes | None = b""
        try:
            with socket.create_connection((host, port), timeout=5.0) as line:
                stranger_since = stranger_since or time.monotonic()
                reader = LineReader(line)
                line.sendall(said)
                greeting = reader.read(stranger_since + STRANGER_S)
                if greeting and not meeting_lines.is_greeting(greeting):
                    raise _not_of_this_run(host, port)
                if greeting:
                    stranger_since = None
                    answer = _wait_for_answer(reader, index, place, patience)
        except OSError as error:
            problem = str(error)
            if isinstance(error, ConnectionRefusedError):
                stranger_since = None
        if answer:
            _read_answer(answer, host, port)
            _wait_for_service(host, port)
            return
        if stranger_since is not None and time.monotonic() > stranger_since + STRANGER_S:
            raise _not_of_this_run(host, port)
        patience.report(f"Process {index} of {num_processes} waits for {place} ({problem})")
        time.sleep(0.2)
    raise StartupError(
        f"Process {index} of {num_processes} could not reach {place} within "
        f"{patience.timeout_s:g} s ({problem}). Check that it was started, and that this host "
        f"({socket.gethostname()}) can reach it."
    )


def _wait_for_service(host: str, port: int) -> None:
    """Returns when JAX's service listens: who comes before tries again after a second only."""
    deadline = time.monotonic() + _SERVICE_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.005)


def _wait_for_answer(
    reader: LineReader, index: int, place: str, patience: _Patience
) -> bytes | None:
    while True:
        answer = reader.read(time.monotonic() + _SLICE_S)
        if answer is not None:
            return answer
        patience.report(f"Process {index} has connected to {place} and waits for the others")
        # The first process gives up first, and says why.
        if patience.waited_s > patience.timeout_s + 10 * _SLICE_S:
            return None


def _read_answer(answer: bytes, host: str, port: int) -> None:
    found = meeting_lines.parse(answer)
    if not found:
        raise _not_of_this_run(host, port)
    if "error" in found:
        raise StartupError(found["error"])


def _not_of_this_run(host: str, port: int) -> StartupError:
    return StartupError(
        f"The program at {host}:{port} does not accept processes of a tpudist run: the run has "
        f"begun without this process (is its number used twice?), or another program uses the "
        f"port. Give each process its own number, end that program, or choose another port."
    )


def _list(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"process {shown}{more}"
