"""Membership: which processes of a run that survives belong to its present generation.

Processes that call `tpudist.experimental.survive` connect here. When one is gone, the others are
told to stop, and when all have, which of them go on: with a coordination service that lives in this
process, and the address of one that has the newest state. Changes that can wait happen between two
steps.
"""

import contextlib
import dataclasses
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from tpudist.processes import json_lines, process_state
from tpudist.processes.json_lines import JsonLines, Listener
from tpudist.processes.peer_connections import is_ipv6
from tpudist.processes.process_judge import HANG_VARIABLE, hang_timeout
from tpudist.xla import internals

MAX_WITHOUT_PROGRESS = 8
"""After how many generations in which no state was committed the run is given up."""
SUPERVISORS_S = 20.0
"""How long this host waits at the end until other hosts know of it."""
LATE_S = 3.0
"""After which a spare takes the place of a process that has not come when the run starts."""
REPORT_S = 5.0
"""After which those are named for whom the others wait."""
_LOOK_S = 0.5


@dataclasses.dataclass(eq=False)
class Member:
    """A process that is connected.

    Attributes:
        line: The connection.
        index: Its number among those that were started.
        place: Where it runs; see `process_state`.
        address: Host and port where it gives its state.
        allowed: With how many processes it can go on; None for any number.
    """

    line: JsonLines
    index: int
    place: str
    address: tuple[str, int]
    allowed: Collection[int] | None
    ready: int = -1  # for which generation
    commit: int = -1  # the newest that it has
    began: int = -1
    paused: int | None = None  # which commit it had done when it was to wait for a word
    has_stopped: bool = False
    has_finished: bool = False
    is_leaving: bool = False

    def send(self, **message: Any) -> None:
        """Sends a message, if it is there still."""
        try:
            self.line.send(**message)
        except OSError:  # its end is noticed by who reads
            pass


class Membership:
    """The processes of a run, and its generations.

    Attributes:
        address: `host port secret`, for the processes.
        is_used: Whether a process has ever connected.
        is_done: Whether the program has ended in all of them.
        gave_up: Why there is no other generation; empty while there may be.
    """

    def __init__(
        self,
        host: str,
        count: int,
        tell: Callable[[str], None],
        *,
        port: int = 0,
        secret: str | None = None,
    ):
        """Listens for processes.

        Args:
            host: The address of this host at which they come, and their services are.
            count: With how many the run begins, and is to go on where that many are there.
            tell: Called with each line about what becomes of them.
            port: Where it listens; 0 for any that is free.
            secret: What those know who may connect; by default a new one.

        Raises:
            OSError: The address is another host's, or the port is taken.
            ValueError: The variable of the time that they may be waited for is no such number.
        """
        self._host, self._count, self._print = host, count, tell
        self._lock = threading.RLock()
        self._members: list[Member] = []
        self._present: list[Member] = []  # those of this generation, by rank
        self._generation = 0
        self._services: list[tuple[Any, list[Member]]] = []
        self._phase = "gathering"
        self._num_supervisors = 0
        self._came: set[int] = set()
        self._best_commit, self._without_progress = -1, 0
        self._since_s, self._next_report_s = time.monotonic(), REPORT_S
        self._limit_s = hang_timeout()
        self._cause_s, self._enough_since_s = math.nan, math.inf
        self.is_used = self.is_done = False
        self.ends_all = False
        self.gave_up = ""
        self._closing = threading.Event()
        secret = secret or json_lines.make_secret()
        self._listener = Listener(host, secret, self._serve, port=port)
        self.address = f"{host} {self._listener.port} {secret}"
        threading.Thread(target=self._look_often, name="tpudist membership", daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        deadline = time.monotonic() + SUPERVISORS_S
        while self.is_used and self._num_supervisors and time.monotonic() < deadline:
            time.sleep(0.02)  # for them to know how it has ended
        self._closing.set()
        self._listener.close()
        with self._lock:
            for member in self._members:
                member.line.close()

    def is_member(self, index: int) -> bool:
        """Whether the process that was started as number `index` has ever connected."""
        with self._lock:
            return index in self._came

    def has_finished(self, index: int) -> bool:
        """Whether the program has ended in the process that was started as number `index`."""
        with self._lock:
            return any(x.index == index and x.has_finished for x in self._present)

    def waits_for_others(self) -> int | None:
        """How many processes wait for others to come, without whom they cannot go on; or None."""
        with self._lock:
            return len(self._members) if self._phase == "waiting" else None

    def end_all(self) -> None:
        """Has all processes end at the next commit, where they save their state."""
        with self._lock:
            self.ends_all = True
            for member in self._members:
                member.is_leaving = True
            self._change_when_possible()

    # What processes say.

    def _serve(self, line: JsonLines) -> None:
        hello = line.read()
        if hello is not None and "supervisor" in hello:
            self._answer_supervisor(line)
        if hello is None or "hello" not in hello:
            return
        member = Member(
            line,
            hello["hello"],
            hello["place"],
            (hello["host"], hello["port"]),
            hello["allowed"],
        )
        with self._lock:
            if not self.is_used:
                self._since_s = time.monotonic()  # nobody has waited before
            self.is_used = True
            self._came.add(member.index)
            self._members.append(member)
            self._on_come(member)
        for message in line:
            with self._lock:
                self._hear(member, message)
        with self._lock:
            if member in self._members:
                self._on_gone(member)

    def _answer_supervisor(self, line: JsonLines) -> None:
        """Says to the supervisor of another host what is known, as often as it asks."""
        with self._lock:
            self._num_supervisors += 1
        with contextlib.suppress(OSError):
            for question in line:
                if question["end_all"] and not self.ends_all:
                    self.end_all()
                with self._lock:
                    line.send(
                        is_used=self.is_used,
                        is_done=self.is_done,
                        gave_up=self.gave_up,
                        came=sorted(self._came),
                        finished=[x.index for x in self._present if x.has_finished],
                    )
        with self._lock:
            self._num_supervisors -= 1

    def _hear(self, member: Member, message: dict[str, Any]) -> None:
        if "hello" in message:
            self._welcome_again(member, message["host"], message["port"])
        elif "ready" in message:
            member.ready, member.commit = message["ready"], message["commit"]
            self._go_if_ready()
        elif "began" in message:
            member.began = message["began"]
            if all(x.began == self._generation for x in self._present):
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
            if all(x.has_finished for x in self._present):
                self._finish()
            else:
                self._stop_if_paused()
                self._begin_if_stopped()
        elif "leaving" in message:
            self._print(
                f"process {member.index} received a request to end. It leaves after this step."
            )
            member.is_leaving = True
            self._change_when_possible()
        elif "lost" in message:
            rank = message["lost"]
            if rank < len(self._present):
                self._end(self._present[rank], message["why"])
        elif "failed" in message and message["failed"] == self._generation:
            why = f"process {member.index} cannot join the others: {message['why']}"
            self._print(why)
            self._begin_generation(why)

    def _welcome_again(self, member: Member, host: str, port: int) -> None:
        """Tells a program what it may not have heard while it started again in its process."""
        member.address = host, port
        member.send(welcome=True)
        if self.is_done:
            member.send(done=True)
        elif member not in self._members:
            member.send(leave=True)
        elif member in self._present:
            member.send(stop=self._generation, why="")

    def _on_come(self, member: Member) -> None:
        if self.is_done:
            member.send(done=True)
        elif self._phase == "gathering":
            self._begin_if_all_came()
        elif self._phase == "waiting":
            self._begin_generation(f"process {member.index} joined")
        else:
            self._change_when_possible()

    def _begin_if_all_came(self) -> None:
        """The first processes belong to the first generation, where none of them is late."""
        if self._phase != "gathering" or len(self._members) < self._count:
            return
        self._enough_since_s = min(self._enough_since_s, time.monotonic())
        are_first = {x.index for x in self._members}.issuperset(range(self._count))
        if are_first or time.monotonic() - self._enough_since_s > LATE_S:
            self._begin_generation("")

    def _on_gone(self, member: Member) -> None:
        self._members.remove(member)
        member.line.close()
        if self.is_done or member not in self._present:
            self._tidy()
            return
        self._cause_s = time.monotonic()
        self._begin_generation(f"process {member.index} was lost")
        self._tidy()

    def _tidy(self) -> None:
        """Forgets services that nobody is connected to."""
        there = set(self._members)
        self._services = [x for x in self._services if there.intersection(x[1])]

    def _end(self, member: Member, why: str) -> None:
        """Ends a process that does nothing, so that the others go on."""
        self._print(f"ending process {member.index}. {why}")
        pid = process_state.pid_here(member.place)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        member.line.close()

    # Changes that can wait.

    def _next_members(self) -> list[Member]:
        """Who would belong to the next generation: those of this one first."""
        able = [x for x in self._members if not x.is_leaving]
        able.sort(key=lambda x: (x not in self._present, x.index))
        most = min(len(able), self._count)
        for count in range(most, 0, -1):
            chosen = able[:count]
            if all(x.allowed is None or count in x.allowed for x in chosen):
                return chosen
        return []

    def _change_when_possible(self) -> None:
        """Ends this generation between two steps, if the next would have other processes."""
        if self._phase != "running":
            return
        wanted = self._next_members()
        if wanted != self._present and (len(wanted) > len(self._present) or self._some_leave()):
            self._phase = "pausing"
            for member in self._present:
                member.send(pause=True, generation=self._generation)
            self._stop_if_paused()

    def _some_leave(self) -> bool:
        return any(x.is_leaving for x in self._present)

    def _stop_if_paused(self) -> None:
        if self._phase != "pausing" or any(x.paused is None for x in self._present):
            return
        self._phase = "stopping"
        # The next commit of the one that is furthest: nobody has passed it, and all come to it.
        last = max(x.paused or 0 for x in self._present) + 1
        for member in self._present:
            member.has_stopped = member.has_finished
            member.send(stop_at=last, generation=self._generation, ends_all=self.ends_all)
        self._begin_if_stopped()

    def _begin_if_stopped(self) -> None:
        if self._phase == "stopping" and all(x.has_stopped for x in self._present):
            self._cause_s = time.monotonic()
            self._begin_generation("processes joined, or received a request to end")

    # Generations.

    def _begin_generation(self, why: str) -> None:
        """Lets others belong to the run from here on; `why` is what the processes note."""
        for member in [x for x in self._members if x.is_leaving]:
            member.send(leave=True)
            self._members.remove(member)
        before = self._present
        self._present = self._next_members()
        self._generation += 1
        self._since_s, self._next_report_s = time.monotonic(), REPORT_S
        for member in {*before, *self._present}.intersection(self._members):
            member.paused, member.has_stopped, member.has_finished = None, False, False
            member.send(stop=self._generation, why=why)
        if not self._present:
            self._phase = "waiting"
            return
        self._phase = "collecting"

    def _go_if_ready(self) -> None:
        if self._phase != "collecting" or any(x.ready != self._generation for x in self._present):
            return
        newest = max(self._present, key=lambda x: x.commit)
        if newest.commit > self._best_commit:
            self._best_commit, self._without_progress = newest.commit, 0
        else:
            self._without_progress += 1
            if self._without_progress > MAX_WITHOUT_PROGRESS:
                self.gave_up = (
                    f"giving up: processes were lost {self._without_progress} times without a "
                    f"commit in between."
                )
                return
        self._phase = "joining"
        count = len(self._present)
        address = f"{self._host}:{_free_port(self._host)}"
        service = internals.start_coordination_service(address, count)
        self._services.append((service, list(self._present)))
        donors = [x for x in self._present if x.commit == newest.commit >= 0]
        cluster = [f"{host}:{port}" for host, port in (x.address for x in self._present)]
        for rank, member in enumerate(self._present):
            donor = None
            if donors:
                host, port = donors[rank % len(donors)].address
                donor = {"host": host, "port": port, "commit": newest.commit}
            member.send(
                go=self._generation,
                rank=rank,
                count=count,
                service=address,
                donor=donor,
                cluster=cluster,
            )

    def _on_begun(self) -> None:
        if self._phase != "joining":
            return
        self._phase = "running"
        now = time.monotonic()
        if self._generation > 1 or len(self._present) != self._count:
            took = f" after {now - self._cause_s:.2f} s" if not math.isnan(self._cause_s) else ""
            numbers = ", ".join(str(x.index) for x in self._present)
            commit = max(x.commit for x in self._present)
            what = (
                f"continue from commit {commit}{took}"
                if commit >= 0
                else f"start from scratch{took}: no remaining process has state in memory"
            )
            self._print(f"generation {self._generation}: processes {numbers} {what}.")
        self._tidy()
        if any(x.is_leaving for x in self._present):
            self._change_when_possible()
        elif len(self._next_members()) > len(self._present):
            self._change_when_possible()

    def _finish(self) -> None:
        self.is_done = True
        for member in self._members:
            member.send(done=True)

    def _look_often(self) -> None:
        while not self._closing.wait(_LOOK_S):
            with self._lock:
                self._begin_if_all_came()
                self._look_who_is_waited_for()

    def _look_who_is_waited_for(self) -> None:
        """Names those for whom the others wait, and ends the wait."""
        if self._phase == "gathering":
            missing = sorted(set(range(self._count)) - {x.index for x in self._members})
            missing = missing if self._members else []
            late: list[Member] = []
        else:
            states = {"collecting": "ready", "joining": "began"}
            state = states.get(self._phase, "")
            late = [x for x in self._present if state and getattr(x, state) != self._generation]
            missing = [x.index for x in late]
        waited_s, limit_s = time.monotonic() - self._since_s, self._limit_s
        if not missing or waited_s < min(self._next_report_s, limit_s):
            return
        numbers = ", ".join(map(str, missing))
        if waited_s < limit_s:
            self._next_report_s *= 2
            self._print(
                f"waiting for process(es) {numbers} to join generation "
                f"{max(self._generation, 1)}: {waited_s:.0f} s of {limit_s:g}."
            )
        for member in late if waited_s > limit_s else ():
            self._end(member, f"It did not join the others within {limit_s:g} s.")
        if waited_s > limit_s and not late:
            self.gave_up = (
                f"process(es) {numbers} did not call tpudist.experimental.survive within "
                f"{limit_s:g} s ({HANG_VARIABLE}), while the others waited: giving up."
            )


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
    with socket.create_server((host, 0), family=family) as found:
        return found.getsockname()[1]
