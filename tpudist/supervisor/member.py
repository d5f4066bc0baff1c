"""Processes that are connected to the supervisor, and the choice of the next generation."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from tpudist.processes.json_lines import JsonConnection


@dataclasses.dataclass(eq=False)
class Member:
    """A process of a run that called `tpudist.experimental.survive`.

    Attributes:
        connection: Connection to the process.
        index: Number with which the process was started.
        place: Host and pid; see `process_state`.
        address: Host and port at which it sends its state to others.
        allowed: Numbers of processes with which its program can run; None for any number.
        cluster_digest: Digest of the cluster in its TF_CONFIG; see `cluster_addresses`.
        ready_for: Last generation for which it has left its old runtime.
        commit: Newest commit whose state it has in memory; -1 if there is none.
        running: Last generation whose program it has started.
        paused_at: Commit after which it waits for permission to continue; None if it does not wait.
        has_stopped: Whether its program has stopped in this generation.
        has_finished: Whether its program has returned in this generation.
        is_leaving: Whether it received a request to end.
    """

    connection: JsonConnection
    index: int
    place: str
    address: tuple[str, int]
    allowed: Collection[int] | None
    cluster_digest: str = ""
    ready_for: int = -1
    commit: int = -1
    running: int = -1
    paused_at: int | None = None
    has_stopped: bool = False
    has_finished: bool = False
    is_leaving: bool = False

    def send(self, **message: Any) -> None:
        """Sends a message if the process is still connected."""
        try:
            self.connection.send(**message)
        except OSError:  # the thread that reads from it notices the end
            pass


def choose_members(
    connected: Sequence[Member], members: Sequence[Member], count: int
) -> list[Member]:
    """Returns the members of the next generation: as many as possible, at most `count`.

    Members of the present generation come first, because they have the state in memory. The number
    of processes must be allowed for each of them; if no number is, the list is empty.
    """
    able = [x for x in connected if not x.is_leaving]
    able.sort(key=lambda x: (x not in members, x.index))
    # The largest allowed number wins. Removing from the end keeps the processes that have the
    # state.
    for size in range(min(len(able), count), 0, -1):
        chosen = able[:size]
        if all(x.allowed is None or size in x.allowed for x in chosen):
            return chosen
    return []
