"""The processes of a run meet before JAX connects them, to find out who is missing or does not fit.

JAX's own start-up waits for 300 s and does not say for whom, and a taken port, a second process of
the same number or another count end it by an abort, or not at all. So the first process listens at
its address first, the others tell it who they are, and when all have come they go on together.
"""

import contextlib
import errno
import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from tpudist.errors import StartupError
from tpudist.xla import versions

_log = logging.getLogger("tpudist")

TIMEOUT_S = 300.0
RESOLVE_S = 10.0
"""For how long a name may be unknown: that of a pod is for some seconds."""
_REPORT_S = 5.0  # after which a wait is first told of; then after twice that time, and so on
_SLICE_S = 0.5
_SERVICE_S = 5.0
_MAX_BYTES = 4096  # of what a process says


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
            f"Process {index} of {num_processes} was to be started. Of {num_processes} processes "
            f"the numbers are 0 to {num_processes - 1}."
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
            f"The first process's address is {address!r}. It must be host:port with a port from 1 "
            f"to 65535, such as '10.0.0.1:8476'."
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


def _describe_self(num_processes: int, index: int) -> dict[str, Any]:
    return {
        "tpudist": versions.version_of("tpudist"),
        "jax": jax.__version__,
        "count": num_processes,
        "index": index,
        "who": f"{socket.gethostname()}, process id {os.getpid()}",
    }


# The first process.


def _receive(host: str, port: int, num_processes: int, patience: _Patience) -> None:
    with _listen(host, port) as server, selectors.DefaultSelector() as selector:
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
                        f"Of {num_processes} processes, {who} did not come to {host}:{port} within "
                        f"{patience.timeout_s:g} s. See whether it was started, with this address, "
                        f"and whether its host reaches this one."
                    )
            server.close()  # so that from now on only JAX's service answers there
            guests.answer({"ok": True})
        except StartupError as error:
            guests.answer({"error": str(error)})
            raise
        finally:
            guests.close()


class _Guests:
    """Who has come to the first process."""

    def __init__(self, num_processes: int, address: str):
        self._host = _describe_self(num_processes, 0)
        self._address = address
        self._texts: dict[socket.socket, bytes] = {}
        self._known: dict[int, tuple[socket.socket, dict[str, Any]]] = {}

    @property
    def missing(self) -> list[int]:
        return [i for i in range(1, self._host["count"]) if i not in self._known]

    def open(self, line: socket.socket) -> None:
        self._texts[line] = b""

    def read(self, line: socket.socket) -> bool:
        """Takes what has come; whether the guest stays."""
        try:
            found = line.recv(_MAX_BYTES)
        except OSError:
            found = b""
        self._texts[line] += found
        if not found or len(self._texts[line]) > _MAX_BYTES:
            del self._texts[line]
            self._known = {i: x for i, x in self._known.items() if x[0] is not line}
            return False
        if self._texts[line].endswith(b"\n"):
            try:
                said = dict(json.loads(self._texts[line]))
            except (ValueError, TypeError):
                said = {}
            numbers = said.get("index"), said.get("count")
            if not all(type(x) is int for x in numbers) or "who" not in said:  # not of ours
                del self._texts[line]
                return False
            self._welcome(line, said)
        return True

    def _welcome(self, line: socket.socket, said: dict[str, Any]) -> None:
        index, host = said["index"], self._host
        known = self._known.setdefault(index, (line, said))
        for name, what in (
            ("count", "number of processes"),
            ("jax", "version of jax"),
            ("tpudist", "version of tpudist"),
        ):
            if said.get(name) != host[name]:
                raise StartupError(
                    f"Process {index} ({said['who']}) has {said.get(name)} as its {what}, and "
                    f"process 0 ({host['who']}) has {host[name]}. All processes of a run must have "
                    f"the same."
                )
        if known[0] is not line or index == 0:
            other = host if index == 0 else known[1]
            raise StartupError(
                f"Two processes say that they are number {index}: {other['who']}; {said['who']}. "
                f"Give each its own, from 0 to {host['count'] - 1}: the index of its task in "
                f"TF_CONFIG, for one."
            )

    def answer(self, answer: dict[str, Any]) -> None:
        for line in self._texts:
            with contextlib.suppress(OSError):
                line.setblocking(True)
                line.settimeout(_SLICE_S)
                line.sendall(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        """After the others: whose side closes first, its port stays taken for a minute."""
        deadline = time.monotonic() + 2.0
        for line in self._texts:
            with contextlib.suppress(OSError):
                while time.monotonic() < deadline and line.recv(_MAX_BYTES):
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
        errno.EADDRINUSE: "Another program has the port, perhaps an earlier run or a second "
        "process with the number 0: end it, or choose another port.",
        errno.EADDRNOTAVAIL: f"This host ({socket.gethostname()}) has no such address: process 0 "
        f"must run on the host that the address names.",
        errno.EACCES: "Ports below 1024 are the system's: choose another one.",
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
                    f"The first process's host {host!r} is unknown on {socket.gethostname()} "
                    f"({error}). Use a name that all hosts know, or an address."
                ) from error
            time.sleep(_SLICE_S)


# The other processes.


def _visit(host: str, port: int, num_processes: int, index: int, patience: _Patience) -> None:
    said = json.dumps(_describe_self(num_processes, index)).encode() + b"\n"
    place = f"process 0 at {host}:{port}"
    _resolve(host, port)
    problem = "nobody listens there"
    while not patience.is_over:
        try:
            with socket.create_connection((host, port), timeout=5.0) as line:
                line.sendall(said)
                answer = b"".join(_parts_of_answer(line, index, place, patience))
        except OSError as error:
            problem, answer = str(error), b""
        if answer:
            _read_answer(answer, host, port)
            _wait_for_service(host, port)
            return
        patience.report(f"Process {index} of {num_processes} waits for {place} ({problem})")
        time.sleep(0.2)
    raise StartupError(
        f"Process {index} of {num_processes} could not reach {place} within "
        f"{patience.timeout_s:g} s ({problem}). See whether it was started, and whether this host "
        f"({socket.gethostname()}) reaches it."
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


def _parts_of_answer(
    line: socket.socket, index: int, place: str, patience: _Patience
) -> Iterator[bytes]:
    line.settimeout(_SLICE_S)
    while True:
        try:
            part = line.recv(_MAX_BYTES)
        except TimeoutError:
            patience.report(f"Process {index} has come to {place} and waits for the others")
            # The first process gives up first, and says why.
            if patience.waited_s > patience.timeout_s + 10 * _SLICE_S:
                return
            continue
        yield part
        if not part or part.endswith(b"\n"):
            return


def _read_answer(answer: bytes, host: str, port: int) -> None:
    try:
        found = dict(json.loads(answer))
    except (ValueError, TypeError) as error:
        raise StartupError(
            f"What listens at {host}:{port} does not wait for processes of a tpudist run: the run "
            f"has begun without this one (is its number given twice?), or another program has the "
            f"port."
        ) from error
    if "error" in found:
        raise StartupError(found["error"])


def _list(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"process {shown}{more}"
