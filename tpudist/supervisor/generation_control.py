"""GenerationControl: decides which processes form a generation, and leads them through it.

A generation is a set of processes with one JAX runtime. Its members have ranks; the index of a
process is the number with which it was started, and never changes. Messages, as JSON lines:

| message | direction | meaning |
|---|---|---|
| `stop=g` | to members | the old generation is over: leave its runtime, prepare for generation g |
| `ready=g, commit=c` | from a member | left; has the state of commit c in memory |
| `go=g, rank, count, service, donor, members` | to members | connect, with this state, and run |
| `began=g` | from a member | connected; its program runs |
| `pause`, `paused` | to, from | stop after the present commit, and wait |
| `stop_at=c` | to members | continue up to commit c, and stop there |
| `stopped=g`, `finished=g` | from a member | the program has stopped, or has returned |
| `leaving` | from a member | it received a request to end |
| `asks`, `no_loss` | from, to | a step failed; the answer follows an order to stop, if any |
| `raised` | from a member | its program raised this error, so all end |
| `lost=rank, generation=g, why` | from a member | its watch: this process does not continue |
| `leave`, `done` | to members | end: without the others, or because the program has returned |
"""

import enum
import math
import socket
from collections.abc import Callable, Sequence
from typing import Any

from tpudist.options.member_names import format_members
from tpudist.processes import process_state
from tpudist.processes.cluster_addresses import digest_of, encode
from tpudist.processes.host import this_host
from tpudist.processes.judge.process_judge import HANG_VARIABLE, hang_timeout
from tpudist.processes.peer_connections import is_ipv6
from tpudist.processes.reported_wait import ReportedWait
from tpudist.supervisor.member import Member, choose_members

MAX_WITHOUT_PROGRESS = 8
"""Number of generations in a row without a commit, after which the run is given up."""
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
        cluster: Addresses with which the launcher started the processes; see `cluster_addresses`.

    Attributes:
        connected: All connected processes, also processes that wait for a later generation.
        members: Processes of this generation, by rank.
        phase: State of this generation.
        is_done: Whether the program has returned in all processes.
        ends_all: Whether all processes end at the next commit.
        gave_up: Reason why there is no other generation, or "". The launcher then ends the run.
        failed: Error of the program that ends the run, or "". The processes end by themselves.

    Raises:
        ValueError: If the variable of the hang timeout is not a positive number.
    """

    def __init__(
        self,
        host: str,
        count: int,
        report: Callable[[str], None],
        cluster: Sequence[str] = (),
    ):
        self._cluster_digest, self._cluster_size = digest_of(cluster), len(cluster)
        self._host, self._count, self._report = host, count, report
        self.connected: list[Member] = []
        self.members: list[Member] = []
        self.phase = Phase.GATHERING
        self.is_done = self.ends_all = False
        self.gave_up = self.failed = ""
        self._generation = 0
        # Coordination services with the members that may be connected to them. JAX aborts a process
        # that loses its service, so a service lives as long as any of its members is connected,
        # even if that one is already in a later generation.
        self._services: list[tuple[object, list[Member]]] = []
        self._best_commit, self._num_without_progress = -1, 0
        self._limit_s = hang_timeout()
        self._changed_s: float | None = None  # when the last loss or change began
        self._enough_since_s = math.inf  # since when enough processes for a start are connected
        self.restart_clock()

    def restart_clock(self) -> None:
        """Starts the time of a wait again."""
        self._wait = ReportedWait(REPORT_S, self._limit_s, self._report)

    def add(self, member: Member) -> None:
        """Adds a process that has connected."""
        self.connected.append(member)
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
        if member not in self.connected:
            return
        self.connected.remove(member)
        member.connection.close()
        if not self.is_done and member in self.members:
            self._changed_s = this_host().monotonic()
            self._begin_generation(f"process {member.index} was lost")
        self._drop_services()

    def receive(self, member: Member, message: dict[str, Any]) -> None:
        """Handles a message of a process. Messages of an earlier generation are ignored."""
        # Each message has one of the keys below, which names its kind. Messages of an earlier
        # generation are normal: the member had sent them before it read `stop`.
        if "hello" in message:
            member.cluster_digest = message["cluster"]
            self._welcome_again(member, message["host"], message["port"])
        elif "ready" in message:
            member.ready_for, member.commit = message["ready"], message["commit"]
            self._go_if_ready()
        elif "began" in message:
            member.running = message["began"]
            if all(x.running == self._generation for x in self.members):
                self._on_begun()
        elif "paused" in message and message["paused"] == self._generation:
            member.paused_at = message["commit"]
            self._stop_if_paused()
        elif "stopped" in message and message["stopped"] == self._generation:
            member.has_stopped = True
            self._begin_if_stopped()
        elif "finished" in message and message["finished"] == self._generation:
            member.has_finished = member.has_stopped = True
            member.paused_at = message["commit"]
            if all(x.has_finished for x in self.members):
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
        elif "asks" in message:
            member.send(no_loss=True)
        elif "raised" in message and not self.failed and not self.is_done:
            # The others would raise the same error, or have no process to continue with.
            self.failed = f"process {member.index} raised {message['raised']}"
            self._report(f"{self.failed}. All processes end.")
            for spare in set(self.connected).difference(self.members):  # has no watch that ends it
                spare.send(done=True)
        elif "lost" in message and message.get("generation") == self._generation:
            # A rank, not the index of a member. In the next generation it is another process, and
            # the watch repeats its report until the sender has left this one.
            self._kill(self.members[message["lost"]], message["why"])
        elif "failed" in message and message["failed"] == self._generation:
            why = f"process {member.index} cannot join the others: {message['why']}"
            self._report(why)
            self._begin_generation(why)

    def end_all(self) -> None:
        """Ends all processes at the next commit, where they save their state."""
        self.ends_all = True
        for member in self.connected:
            member.is_leaving = True
        self._change_when_possible()

    def check_progress(self) -> None:
        """Names processes for which the others wait, and ends the wait after the hang timeout."""
        if self.failed:
            return
        self._begin_if_all_came()
        late = self._find_late()
        if self.phase is Phase.GATHERING:
            indices = {x.index for x in self.connected}
            missing = sorted(set(range(self._count)) - indices) if self.connected else []
        else:
            missing = [x.index for x in late]
        if not missing:
            return
        processes, generation = format_members("process", missing), max(self._generation, 1)
        if not self._wait.is_over:
            self._wait.report(lambda: f"waiting for {processes} to join generation {generation}")
            return
        limit_s = self._limit_s
        for member in late:
            self._kill(member, f"It did not join the others within {limit_s:g} s.")
        if not late:
            self.gave_up = (
                f"{processes} did not call tpudist.experimental.survive within "
                f"{limit_s:g} s ({HANG_VARIABLE}), while the others waited: giving up."
            )

    def _find_late(self) -> list[Member]:
        if self.phase is Phase.COLLECTING:
            return [x for x in self.members if x.ready_for != self._generation]
        if self.phase is Phase.JOINING:
            return [x for x in self.members if x.running != self._generation]
        return []

    def _welcome_again(self, member: Member, host: str, port: int) -> None:
        """Repeats what a program may have missed while another one replaced it in its process."""
        # `welcome` first: the connection may still contain messages for the replaced program, and
        # the new one skips everything before it.
        member.address = host, port
        member.send(welcome=True)
        if self.is_done:
            member.send(done=True)
        elif member not in self.connected:
            member.send(leave=True)
        elif member in self.members:
            member.send(stop=self._generation, why="")

    def _begin_if_all_came(self) -> None:
        """Begins the first generation with the first processes, or with spares for late ones."""
        if self.phase is not Phase.GATHERING or len(self.connected) < self._count:
            return
        self._enough_since_s = min(self._enough_since_s, this_host().monotonic())
        are_first = {x.index for x in self.connected}.issuperset(range(self._count))
        if are_first or this_host().monotonic() - self._enough_since_s > LATE_S:
            self._begin_generation("")

    def _drop_services(self) -> None:
        """Drops coordination services to which no process is connected."""
        connected = set(self.connected)
        self._services = [x for x in self._services if connected.intersection(x[1])]

    def _kill(self, member: Member, why: str) -> None:
        """Removes a process that does not continue; kills it if it is on this host."""
        self._report(f"ending process {member.index}. {why}")
        pid = process_state.pid_here(member.place)
        if pid is not None:
            this_host().kill(pid)
        # At once, before other members report the same. A process on another host ends by itself
        # when it reads that its connection has ended; until it can, the others do without it.
        self.remove(member)

    # Changes that can wait: a process joins, or received a request to end. They happen between two
    # steps, so that no step is repeated. The members may be in different steps, so first all pause
    # after a commit (PAUSING). The last commit is one more than the commit of the most advanced
    # member: no member has passed it, and each can reach it, because its peers continue, too.

    def _change_when_possible(self) -> None:
        """Ends this generation between two steps, if the next one would have other processes."""
        if self.phase is not Phase.RUNNING:
            return
        chosen = choose_members(self.connected, self.members, self._count)
        is_larger = len(chosen) > len(self.members)
        if chosen != self.members and (is_larger or any(x.is_leaving for x in self.members)):
            self.phase = Phase.PAUSING
            for member in self.members:
                member.send(pause=True, generation=self._generation)
            self._stop_if_paused()

    def _stop_if_paused(self) -> None:
        commits = [x.paused_at for x in self.members if x.paused_at is not None]
        if self.phase is not Phase.PAUSING or len(commits) < len(self.members):
            return
        self.phase = Phase.STOPPING
        last = max(commits) + 1
        for member in self.members:
            # A program that has returned takes no other step, so it will not report "stopped".
            member.has_stopped = member.has_finished
            member.send(stop_at=last, generation=self._generation, ends_all=self.ends_all)
        self._begin_if_stopped()

    def _begin_if_stopped(self) -> None:
        if self.phase is Phase.STOPPING and all(x.has_stopped for x in self.members):
            self._changed_s = this_host().monotonic()
            self._begin_generation("processes joined, or received a request to end")

    # Generations.

    def _begin_generation(self, why: str) -> None:
        """Begins a generation; `why` is the reason that the processes record; "" at the start."""
        if self.failed:
            return
        # Processes that leave are removed before the choice. A spare that waits is connected, but
        # not a member, and gets no message until it is chosen.
        for member in [x for x in self.connected if x.is_leaving]:
            member.send(leave=True)
            self.connected.remove(member)
        before = self.members
        self.members = choose_members(self.connected, before, self._count)
        self._generation += 1
        self.restart_clock()
        # Also to members of the last generation that are not in this one: they stop and wait.
        for member in {*before, *self.members}.intersection(self.connected):
            member.paused_at, member.has_stopped, member.has_finished = None, False, False
            member.send(stop=self._generation, why=why)
        self.phase = Phase.COLLECTING if self.members else Phase.WAITING

    def _go_if_ready(self) -> None:
        """Starts a coordination service, and lets all members connect to it."""
        if self.phase is not Phase.COLLECTING:
            return
        if any(x.ready_for != self._generation for x in self.members):
            return
        # The newest commit in any memory is the state of the run: no step is lost that one of the
        # remaining processes has committed.
        newest = max(x.commit for x in self.members)
        self._check_commits(newest)
        if self.gave_up:
            return
        self.phase = Phase.JOINING
        address = f"{self._host}:{_free_port(self._host)}"
        service = this_host().start_coordination_service(address, len(self.members))
        self._services.append((service, list(self.members)))
        # All processes that have the newest state send it, so that the load is shared.
        donors = [x.address for x in self.members if x.commit == newest >= 0]
        addresses = [(x.index, f"{x.address[0]}:{x.address[1]}") for x in self.members]
        without_cluster, with_cluster = (encode(addresses, n) for n in (0, self._cluster_size))
        for rank, member in enumerate(self.members):
            host, port = donors[rank % len(donors)] if donors else ("", 0)
            donor = {"host": host, "port": port, "commit": newest} if donors else None
            knows_cluster = member.cluster_digest == self._cluster_digest
            member.send(
                go=self._generation,
                rank=rank,
                count=len(self.members),
                service=address,
                donor=donor,
                members=with_cluster if knows_cluster else without_cluster,
            )

    def _check_commits(self, newest: int) -> None:
        """Gives up if too many generations in a row made no commit."""
        if newest > self._best_commit:
            self._best_commit, self._num_without_progress = newest, 0
            return
        self._num_without_progress += 1
        if self._num_without_progress > MAX_WITHOUT_PROGRESS:
            self.gave_up = (
                f"giving up: {self._num_without_progress} generations of processes in a row made "
                f"no commit."
            )

    def _on_begun(self) -> None:
        if self.phase is not Phase.JOINING:
            return
        self.phase = Phase.RUNNING
        if self._generation > 1 or len(self.members) != self._count:
            after = ""
            if self._changed_s is not None:
                after = f" after {this_host().monotonic() - self._changed_s:.2f} s"
            processes = format_members("process", (x.index for x in self.members))
            commit = max(x.commit for x in self.members)
            event = (
                f"continue from commit {commit}{after}"
                if commit >= 0
                else f"start from scratch{after}: no remaining process has state in memory"
            )
            self._report(f"generation {self._generation}: {processes} {event}.")
        self._drop_services()
        self._change_when_possible()  # processes may have joined, or want to leave, since the start

    def _finish(self) -> None:
        self.is_done = True
        for member in self.connected:
            member.send(done=True)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
    with this_host().listen(host, 0, family) as server:
        return server.getsockname()[1]
