"""GenerationControl: decides which processes form a generation, and leads them through it.

A generation is a set of processes with one JAX runtime. Messages, as JSON lines:

| message | direction | meaning |
|---|---|---|
| `stop=g` | to members | the old generation is over: leave its runtime, prepare for generation g |
| `ready=g, commit=c` | from a member | left; has the state of commit c in memory |
| `go=g, rank, count, service, donor, cluster` | to members | connect, with this state, and run |
| `began=g` | from a member | connected; its program runs |
| `pause`, `paused` | to, from | stop after the present commit, and wait |
| `stop_at=c` | to members | continue up to commit c, and stop there |
| `stopped=g`, `finished=g` | from a member | the program has stopped, or has returned |
| `leaving` | from a member | it received a request to end |
| `lost=rank, why` | from a member | the watch says that this process does not continue |
| `leave`, `done` | to members | end: without the others, or because the program has returned |
"""

import contextlib
import enum
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from tpudist.processes import process_state
from tpudist.processes.peer_connections import is_ipv6
from tpudist.processes.process_judge import HANG_VARIABLE, hang_timeout
from tpudist.supervisor.member import Member, choose_members
from tpudist.xla import internals

MAX_WITHOUT_PROGRESS = 8
"""Number of generations without a commit after which the run is given up."""
LATE_S = 3.0
"""Seconds until a spare replaces a process that has not arrived at the start of the run."""
REPORT_S = 5.0
"""Seconds until the processes are named for which the others wait."""


class Phase(enum.Enum):
    """State of the present generation.

    GATHERING -> COLLECTING -> JOINING -> RUNNING -> PAUSING -> STOPPING -> COLLECTING ...

    When a process is lost, every phase becomes COLLECTING, with a new generation. Each of these
    phases ends: members answer, or `check_progress` kills late members after the hang timeout.
    """

    GATHERING = "the first processes arrive"
    WAITING = "no allowed number of processes is left; another may join"
    COLLECTING = "members leave the old runtime"
    JOINING = "members connect to the new coordination service"
    RUNNING = "the program runs"
    PAUSING = "members finish their step, to agree on a last commit"
    STOPPING = "members run up to the last commit"


class GenerationControl:
    """The generations of a run. One thread at a time may call it: `Membership` has the lock.

    Args:
        host: Address of this host, at which coordination services listen.
        count: Number of processes of the first generation, and the most of later ones.
        report: Called with lines about the course of the run.

    Attributes:
        members: All connected processes.
        present: Processes of this generation, by rank.
        phase: State of this generation.
        is_done: Whether the program has returned in all processes.
        ends_all: Whether all processes end at the next commit.
        gave_up: Reason why there is no other generation, or "".

    Raises:
        ValueError: If the variable of the hang timeout is not a positive number.
    """

    def __init__(self, host: str, count: int, report: Callable[[str], None]):
        self._host, self._count, self._report = host, count, report
        self.members: list[Member] = []
        self.present: list[Member] = []
        self.phase = Phase.GATHERING
        self.is_done = self.ends_all = False
        self.gave_up = ""
        self._generation = 0
        # Coordination services with the members that may be connected to them. JAX aborts a process
        # that loses its service, so a service lives as long as any of its members is connected,
        # even if that one is already in a later generation.
        self._services: list[tuple[object, list[Member]]] = []
        self._best_commit, self._num_without_progress = -1, 0
        self._limit_s = hang_timeout()
        self._changed_s = math.nan  # when the last loss or change began
        self._enough_since_s = math.inf  # since when enough processes for a start are connected
        self.restart_clock()

    def restart_clock(self) -> None:
        """Starts the time of a wait again."""
        self._since_s, self._next_report_s = time.monotonic(), REPORT_S

    def add(self, member: Member) -> None:
        """Adds a process that has connected."""
        self.members.append(member)
        if self.is_done:
            member.send(done=True)
        elif self.phase is Phase.GATHERING:
            self._begin_if_all_came()
        elif self.phase is Phase.WAITING:
            self._begin_generation(f"process {member.index} joined")
        else:
            self._change_when_possible()

    def remove(self, member: Member) -> None:
        """Removes a process whose connection has ended."""
        if member not in self.members:
            return
        self.members.remove(member)
        member.line.close()
        if not self.is_done and member in self.present:
            self._changed_s = time.monotonic()
            self._begin_generation(f"process {member.index} was lost")
        self._drop_services()

    def receive(self, member: Member, message: dict[str, Any]) -> None:
        """Handles a message of a process. Messages of an earlier generation are ignored."""
        # Each message has one of the keys below, which names its kind. Messages of an earlier
        # generation are normal: the member had sent them before it read `stop`.
        if "hello" in message:
            self._welcome_again(member, message["host"], message["port"])
        elif "ready" in message:
            member.ready, member.commit = message["ready"], message["commit"]
            self._go_if_ready()
        elif "began" in message:
            member.began = message["began"]
            if all(x.began == self._generation for x in self.present):
                self._on_begun()
        elif "paused" in message and message["paused"] == self._generation:
            member.paused = message["commit"]
            self._stop_if_paused()
        elif "stopped" in message and message["stopped"] == self._generation:
            member.has_stopped = True
            self._begin_if_stopped()
        elif "finished" in message and message["finished"] == self._generation:
            member.has_finished = member.has_stopped = True
            member.paused = message["commit"]
            if all(x.has_finished for x in self.present):
                self._finish()
            else:
                self._stop_if_paused()
                self._begin_if_stopped()
        elif "leaving" in message:
            self._report(
                f"process {member.index} received a request to end. It leaves after this step."
            )
            member.is_leaving = True
            self._change_when_possible()
        elif "lost" in message:
            rank = message["lost"]
            if rank < len(self.present):
                self._kill(self.present[rank], message["why"])
        elif "failed" in message and message["failed"] == self._generation:
            why = f"process {member.index} cannot join the others: {message['why']}"
            self._report(why)
            self._begin_generation(why)

    def end_all(self) -> None:
        """Ends all processes at the next commit, where they save their state."""
        self.ends_all = True
        for member in self.members:
            member.is_leaving = True
        self._change_when_possible()

    def check_progress(self) -> None:
        """Names processes for which the others wait, and ends the wait after the hang timeout."""
        self._begin_if_all_came()
        late = self._find_late()
        if self.phase is Phase.GATHERING:
            indices = {x.index for x in self.members}
            missing = sorted(set(range(self._count)) - indices) if self.members else []
        else:
            missing = [x.index for x in late]
        waited_s, limit_s = time.monotonic() - self._since_s, self._limit_s
        if not missing or waited_s < min(self._next_report_s, limit_s):
            return
        numbers = ", ".join(map(str, missing))
        if waited_s < limit_s:
            # After 5, 10, 20 s and so on: a long wait prints few lines.
            self._next_report_s *= 2
            self._report(
                f"waiting for process(es) {numbers} to join generation "
                f"{max(self._generation, 1)}: {waited_s:.0f} s of {limit_s:g}."
            )
            return
        for member in late:
            self._kill(member, f"It did not join the others within {limit_s:g} s.")
        if not late:
            self.gave_up = (
                f"process(es) {numbers} did not call tpudist.experimental.survive within "
                f"{limit_s:g} s ({HANG_VARIABLE}), while the others waited: giving up."
            )

    def _find_late(self) -> list[Member]:
        if self.phase is Phase.COLLECTING:
            return [x for x in self.present if x.ready != self._generation]
        if self.phase is Phase.JOINING:
            return [x for x in self.present if x.began != self._generation]
        return []

    def _welcome_again(self, member: Member, host: str, port: int) -> None:
        """Repeats what a program may have missed while another one replaced it in its process."""
        # `welcome` first: the connection may still contain messages for the replaced program, and
        # the new one skips everything before it.
        member.address = host, port
        member.send(welcome=True)
        if self.is_done:
            member.send(done=True)
        elif member not in self.members:
            member.send(leave=True)
        elif member in self.present:
            member.send(stop=self._generation, why="")

    def _begin_if_all_came(self) -> None:
        """Begins the first generation with the first processes, or with spares for late ones."""
        if self.phase is not Phase.GATHERING or len(self.members) < self._count:
            return
        self._enough_since_s = min(self._enough_since_s, time.monotonic())
        are_first = {x.index for x in self.members}.issuperset(range(self._count))
        if are_first or time.monotonic() - self._enough_since_s > LATE_S:
            self._begin_generation("")

    def _drop_services(self) -> None:
        """Drops coordination services to which no process is connected."""
        connected = set(self.members)
        self._services = [x for x in self._services if connected.intersection(x[1])]

    def _kill(self, member: Member, why: str) -> None:
        """Ends a process that does not continue. On another host, its supervisor ends it."""
        self._report(f"ending process {member.index}. {why}")
        pid = process_state.pid_here(member.place)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # The thread that reads from the line then calls `remove`, as after any other loss. So a
        # process on another host is removed even if nobody can end it.
        member.line.close()

    # Changes that can wait: a process joins, or received a request to end. They happen between two
    # steps, so that no step is repeated. The members may be in different steps, so first all pause
    # after a commit (PAUSING). The last commit is one more than the commit of the most advanced
    # member: no member has passed it, and each can reach it, because its peers continue, too.

    def _change_when_possible(self) -> None:
        """Ends this generation between two steps, if the next one would have other processes."""
        if self.phase is not Phase.RUNNING:
            return
        chosen = choose_members(self.members, self.present, self._count)
        is_larger = len(chosen) > len(self.present)
        if chosen != self.present and (is_larger or any(x.is_leaving for x in self.present)):
            self.phase = Phase.PAUSING
            for member in self.present:
                member.send(pause=True, generation=self._generation)
            self._stop_if_paused()

    def _stop_if_paused(self) -> None:
        if self.phase is not Phase.PAUSING or any(x.paused is None for x in self.present):
            return
        self.phase = Phase.STOPPING
        last = max(x.paused or 0 for x in self.present) + 1
        for member in self.present:
            member.has_stopped = member.has_finished
            member.send(stop_at=last, generation=self._generation, ends_all=self.ends_all)
        self._begin_if_stopped()

    def _begin_if_stopped(self) -> None:
        if self.phase is Phase.STOPPING and all(x.has_stopped for x in self.present):
            self._changed_s = time.monotonic()
            self._begin_generation("processes joined, or received a request to end")

    # Generations.

    def _begin_generation(self, why: str) -> None:
        """Begins a generation; `why` is the reason that the processes record."""
        # Members that leave are removed before the choice. A spare that waits is in `members`, but
        # not in `present`, and gets no message until it is chosen.
        for member in [x for x in self.members if x.is_leaving]:
            member.send(leave=True)
            self.members.remove(member)
        before = self.present
        self.present = choose_members(self.members, before, self._count)
        self._generation += 1
        self.restart_clock()
        # Also to members of the last generation that are not in this one: they stop and wait.
        for member in {*before, *self.present}.intersection(self.members):
            member.paused, member.has_stopped, member.has_finished = None, False, False
            member.send(stop=self._generation, why=why)
        self.phase = Phase.COLLECTING if self.present else Phase.WAITING

    def _go_if_ready(self) -> None:
        """Starts a coordination service, and lets all members connect to it."""
        if self.phase is not Phase.COLLECTING:
            return
        if any(x.ready != self._generation for x in self.present):
            return
        # The newest commit in any memory is the state of the run: no step is lost that one of the
        # remaining processes has committed.
        newest = max(x.commit for x in self.present)
        if newest > self._best_commit:
            self._best_commit, self._num_without_progress = newest, 0
        else:
            self._num_without_progress += 1
            if self._num_without_progress > MAX_WITHOUT_PROGRESS:
                self.gave_up = (
                    f"giving up: processes were lost {self._num_without_progress} times without a "
                    f"commit in between."
                )
                return
        self.phase = Phase.JOINING
        address = f"{self._host}:{_free_port(self._host)}"
        service = internals.start_coordination_service(address, len(self.present))
        self._services.append((service, list(self.present)))
        # All processes that have the newest state send it, so that the load is shared.
        donors = [x.address for x in self.present if x.commit == newest >= 0]
        cluster = [f"{host}:{port}" for host, port in (x.address for x in self.present)]
        for rank, member in enumerate(self.present):
            host, port = donors[rank % len(donors)] if donors else ("", 0)
            donor = {"host": host, "port": port, "commit": newest} if donors else None
            member.send(
                go=self._generation,
                rank=rank,
                count=len(self.present),
                service=address,
                donor=donor,
                cluster=cluster,
            )

    def _on_begun(self) -> None:
        if self.phase is not Phase.JOINING:
            return
        self.phase = Phase.RUNNING
        if self._generation > 1 or len(self.present) != self._count:
            duration_s = time.monotonic() - self._changed_s
            after = f" after {duration_s:.2f} s" if not math.isnan(duration_s) else ""
            numbers = ", ".join(str(x.index) for x in self.present)
            commit = max(x.commit for x in self.present)
            event = (
                f"continue from commit {commit}{after}"
                if commit >= 0
                else f"start from scratch{after}: no remaining process has state in memory"
            )
            self._report(f"generation {self._generation}: processes {numbers} {event}.")
        self._drop_services()
        self._change_when_possible()  # processes may have joined, or want to leave, since the start

    def _finish(self) -> None:
        self.is_done = True
        for member in self.members:
            member.send(done=True)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        return server.getsockname()[1]
