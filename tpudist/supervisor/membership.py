"""Membership: the server to which the processes of a run that survives losses connect.

Processes that call `tpudist.experimental.survive` connect here, and also the supervisors of other
hosts. `GenerationControl` decides what the processes do; this file has the connections, the threads
and the lock.
"""

import contextlib
import importlib
from collections.abc import Callable, Sequence

from tpudist.processes import json_lines
from tpudist.processes.host import this_host
from tpudist.processes.json_lines import JsonConnection, Listener
from tpudist.supervisor.generation_control import GenerationControl, Phase
from tpudist.supervisor.member import Member
from tpudist.xla import versions

SUPERVISORS_S = 20.0
"""Most seconds that this host waits at the end for other hosts to learn the result."""
_CHECK_S = 0.5


class Membership:
    """Connected processes of a run, and their generations.

    Args:
        host: Address of this host, at which it and the coordination services listen.
        count: Number of processes with which the run begins, and to which it returns if possible.
        report: Called with lines about the course of the run.
        port: Port to listen on; 0 for any free port.
        secret: Secret that processes must send; by default a random one.
        cluster: Addresses with which the launcher starts the processes.

    Attributes:
        address: `host port secret`, for the processes.
        is_used: Whether any process has ever connected, so that the program calls `survive`.
        lost: Always "": only other hosts can lose this one.

    Raises:
        OSError: If `host` is not an address of this host, or the port is taken.
        ValueError: If the variable of the hang timeout is not a positive number.
    """

    def __init__(
        self,
        host: str,
        count: int,
        report: Callable[[str], None],
        *,
        port: int = 0,
        secret: str | None = None,
        cluster: Sequence[str] = (),
    ):
        # One lock for everything: each connection has a thread, and a message may change the state
        # of all members. Sending under the lock is safe, because messages are short and fit into
        # the buffers of the connections.
        self._lock = this_host().lock()
        self._control = GenerationControl(host, count, report, cluster)
        self.is_used, self.lost = False, ""
        # Connections of supervisors of other hosts, with the processes that they have started.
        self._supervisors: dict[JsonConnection, set[int]] = {}
        self._announced = self._result()
        self._arrived: set[int] = set()
        self._closing = this_host().event()
        secret = secret or json_lines.make_secret()
        self._listener = Listener(host, secret, self._serve, port=port)
        self.address = f"{host} {self._listener.port} {secret}"
        this_host().start_thread(self._check_repeatedly, name="tpudist membership")

    # Single attributes, which need no lock.

    @property
    def is_done(self) -> bool:
        """Whether the program has returned in all processes."""
        return self._control.is_done

    @property
    def ends_all(self) -> bool:
        """Whether all processes end at the next commit."""
        return self._control.ends_all

    @property
    def gave_up(self) -> str:
        """Reason why there is no other generation, or ""."""
        return self._control.gave_up

    @property
    def failed(self) -> str:
        """Error of the program that ends the run, or ""."""
        return self._control.failed

    @property
    def has_members(self) -> bool:
        """Whether any process of the run is connected."""
        return bool(self._control.connected)

    def close(self) -> None:
        """Ends all connections, after supervisors of other hosts have read the result."""
        deadline = this_host().monotonic() + SUPERVISORS_S
        while self.is_used and self._supervisors and this_host().monotonic() < deadline:
            this_host().sleep(0.02)
        self._closing.set()
        self._listener.close()
        with self._lock:
            for member in self._control.connected:
                member.connection.close()

    def is_member(self, index: int) -> bool:
        """Whether the process that was started as number `index` has ever connected."""
        with self._lock:
            return index in self._arrived

    def has_finished(self, index: int) -> bool:
        """Whether the program has returned in the process that was started as number `index`."""
        with self._lock:
            return any(x.index == index and x.has_finished for x in self._control.members)

    def waits_for_others(self) -> int | None:
        """Returns the number of processes that cannot continue without others, or None."""
        with self._lock:
            is_waiting = self._control.phase is Phase.WAITING
            return len(self._control.connected) if is_waiting else None

    def follow(self, index: int) -> None:
        """Does nothing: this object knows all processes."""

    def end_all(self) -> None:
        """Ends all processes at the next commit, where they save their state."""
        with self._lock:
            self._control.end_all()

    def _serve(self, connection: JsonConnection) -> None:
        """Serves one connection, in its own thread, until it ends."""
        hello = connection.read()
        if hello is not None and "supervisor" in hello:
            self._serve_supervisor(connection)
        if hello is None or "hello" not in hello:
            return
        member = Member(
            connection,
            hello["hello"],
            hello["place"],
            (hello["host"], hello["port"]),
            hello["allowed"],
            hello["cluster"],
        )
        # At once: if the process is lost from here on, the launcher must wait for the others.
        with self._lock:
            if not self.is_used:
                self._control.restart_clock()  # nobody has waited so far
            self.is_used = True
            self._arrived.add(member.index)
            self._notify_supervisors(member.index)
        # `GenerationControl` needs JAX for a program that survives losses, and must not import it
        # under the lock, which takes half a second.
        importlib.import_module("tpudist.xla.internals")
        with self._lock:
            self._control.add(member)
        # The loop ends with the connection: after an exit, a kill, a network failure or `close` of
        # this side. So every loss of a process is handled at one place, `remove`.
        for message in connection:
            with self._lock:
                self._control.receive(member, message)
                self._notify_supervisors()
        with self._lock:
            self._control.remove(member)
            self._notify_supervisors()

    # Supervisors of other hosts. Each gets a message when something changes for it. If all
    # asked repeatedly, thousands of hosts would keep this one busy.

    def _serve_supervisor(self, connection: JsonConnection) -> None:
        """Serves the supervisor of another host (`RemoteMembership`), until it disconnects."""
        indices: set[int] = set()
        for request in connection:
            if request["end_all"] and not self.ends_all:
                self.end_all()
            with self._lock:
                indices.update(request["indices"])
                self._supervisors[connection] = indices
                self._notify(connection)
        with self._lock:
            self._supervisors.pop(connection, None)

    def _result(self) -> tuple[bool, bool, str, str]:
        """Returns the part of the state that concerns all hosts."""
        return self.is_used, self.is_done, self.gave_up, self.failed

    def _notify_supervisors(self, arrived: int | None = None) -> None:
        """Notifies other hosts of changes, under the lock."""
        announced, self._announced = self._announced, self._result()
        if announced == self._announced and arrived is None:  # as after most messages
            return
        for connection, indices in list(self._supervisors.items()):
            if announced != self._announced or arrived in indices:
                self._notify(connection)

    def _notify(self, connection: JsonConnection) -> None:
        indices = self._supervisors[connection]
        members = self._control.members if self.is_done else ()
        with contextlib.suppress(OSError):  # `_serve_supervisor` notices the end
            connection.send(
                version=versions.version_of("tpudist"),
                is_used=self.is_used,
                is_done=self.is_done,
                gave_up=self.gave_up,
                failed=self.failed,
                arrived=sorted(self._arrived.intersection(indices)),
                finished=[x.index for x in members if x.has_finished and x.index in indices],
            )

    def _check_repeatedly(self) -> None:
        while not self._closing.wait(_CHECK_S):
            with self._lock:
                self._control.check_progress()
                self._notify_supervisors()
