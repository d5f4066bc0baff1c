"""RemoteMembership: the membership as the supervisors of hosts other than the first one see it."""

import contextlib
from collections.abc import Callable
from typing import Any

from tpudist.processes import json_lines
from tpudist.processes.host import this_host
from tpudist.processes.reported_wait import ReportedWait
from tpudist.supervisor.hosts import SECRET
from tpudist.xla import versions

CONNECT_S = 300.0
_RETRY_S = 0.2
_REPORT_S = 5.0


class RemoteMembership:
    """A copy of the first host's `Membership`, which sends each change.

    Waits until the supervisor of the first host listens.

    Args:
        host: Address of the first host.
        port: Port of its supervisor.
        secret: Secret of the run.
        report: Called with lines about the wait.

    Attributes:
        address: `host port secret`, for the processes.
        ends_all: Whether this host has requested that all processes end.
        lost: Reason why the run cannot continue without its first host, or "".

    Raises:
        ConnectionError: If the supervisor has another secret, or another version of tpudist.
        TimeoutError: If no supervisor answers at the address.
    """

    def __init__(self, host: str, port: int, secret: str, report: Callable[[str], None]):
        self.address = f"{host} {port} {secret}"
        self.ends_all = False
        self._indices: set[int] = set()
        self.lost = ""
        self._closing = this_host().event()
        self._connection = _connect(host, port, secret, report)
        self._state: dict[str, Any] = {}
        try:
            self._greet(host, port)
        except ConnectionError:
            self._connection.close()
            raise
        self._thread = this_host().start_thread(self._listen, host, name="tpudist membership")

    @property
    def is_used(self) -> bool:
        """Whether any process of the run has ever connected."""
        return self._state["is_used"]

    @property
    def is_done(self) -> bool:
        """Whether the program has returned in all processes."""
        return self._state["is_done"]

    @property
    def gave_up(self) -> str:
        """Reason why there is no other generation, or ""."""
        return self._state["gave_up"]

    @property
    def failed(self) -> str:
        """Error of the program that ends the run, or ""."""
        return self._state["failed"]

    @property
    def has_members(self) -> bool:
        """False: the first host serves the processes of all hosts."""
        return False

    def is_member(self, index: int) -> bool:
        """Whether the process that was started as number `index` has ever connected."""
        return index in self._state["arrived"]

    def has_finished(self, index: int) -> bool:
        """Whether the program has returned in the process that was started as number `index`."""
        return index in self._state["finished"]

    def waits_for_others(self) -> int | None:
        """Returns None: the first host ends the run if its processes cannot continue."""
        return None

    def follow(self, index: int) -> None:
        """Announces a process that this host starts, about which it will ask."""
        self._indices.add(index)
        self._send()

    def end_all(self) -> None:
        """Ends all processes at the next commit, where they save their state."""
        self.ends_all = True
        self._send()

    def close(self) -> None:
        """Stops the updates."""
        self._closing.set()
        self._connection.close()
        self._thread.join(2.0)

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # `_listen` notices the end
            self._connection.send(end_all=self.ends_all, indices=sorted(self._indices))

    def _greet(self, host: str, port: int) -> None:
        # A supervisor drops a connection that begins with another secret.
        with contextlib.suppress(OSError):
            self._connection.send(supervisor=True)
        self._send()
        state = self._connection.read()
        if state is None:
            raise ConnectionError(
                f"The supervisor at {host}:{port} does not accept this host. Set {SECRET} to the "
                f"same text on all hosts, and start the same command on each."
            )
        self._state = state
        ours, theirs = versions.version_of("tpudist"), self._state.get("version")
        if theirs != ours:  # the messages of two versions may differ
            raise ConnectionError(
                f"The supervisor at {host}:{port} has tpudist {theirs or 'of an earlier version'}, "
                f"but this host has {ours}. Install the same version on all hosts."
            )

    def _listen(self, host: str) -> None:
        for state in self._connection:
            # One assignment of a new dict: the thread of the launcher sees the old state or the new
            # one.
            self._state = state
        # After the end of the run the first host closes the connection, as expected.
        if self.is_used and not self.is_done and not self._closing.is_set():
            self.lost = (
                f"Cannot reach the supervisor on {host}, which coordinates this run: giving up. "
                f"Start again from the last checkpoint."
            )


def _connect(
    host: str, port: int, secret: str, report: Callable[[str], None]
) -> json_lines.JsonConnection:
    wait = ReportedWait(_REPORT_S, CONNECT_S, report)
    while True:
        try:
            return json_lines.connect(host, port, secret)
        except OSError as error:
            if wait.is_over:
                raise TimeoutError(
                    f"No supervisor answered at {host}:{port} for {CONNECT_S:g} s ({error}). "
                    f"Start the same command on {host}, the first host, and make sure that this "
                    f"host can reach its port."
                ) from error
            wait.report(lambda: f"waiting for the first host, {host}:{port}")
            this_host().sleep(_RETRY_S)
