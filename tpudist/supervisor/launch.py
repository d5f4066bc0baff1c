"""Runs a program as several processes on this host, and restarts them if that may help.

Decisions depend on exit codes, which docs/fault_tolerance.md lists. A process that raised (1) would
raise again. A process that lost another one (75), was killed by a signal, or saved after SIGTERM
(143) resumes from its checkpoint when it is restarted.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence

from tpudist.options.member_names import format_members
from tpudist.processes import supervisor_variables
from tpudist.processes.exit_codes import (
    EXIT_GAVE_UP,
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
)
from tpudist.processes.host import this_host
from tpudist.supervisor.hosts import Hosts
from tpudist.supervisor.membership import Membership
from tpudist.supervisor.remote_membership import RemoteMembership
from tpudist.supervisor.wakeups import Wakeups, receive_wakeups
from tpudist.supervisor.worker_process import Worker, WorkerProcess
from tpudist.xla import emulation

END_S = 15.0
"""Seconds for the other processes to end by themselves after one has failed."""
GRACE_S = 30.0
"""Seconds for all processes to save their state after this process is asked to end."""
STOPPED_S = 3.0
"""Seconds until a stopped process is killed, if the program survives losses."""
_SETTLE_S = 0.02  # for other processes that end for the same reason
_CHECK_S = 0.2  # between two looks at stopped processes and the membership, which send no signal
_PATIENCE_S = 3.0  # for a process to connect, before the run is given up for lack of processes


@dataclasses.dataclass(frozen=True)
class Launch:
    """A program to run.

    Attributes:
        command: Program and arguments of each process.
        num_processes: Number of processes on each host.
        devices_per_process: Number of emulated devices of each process; None for the devices of
            this host.
        restarts: Number of restarts, of all processes or of a single lost process.
        write: Called with the number of a process and a line that it printed; None stands
            for this process.
        spares: Number of additional processes on each host, which wait until one is lost.
        hosts: Hosts of the run.
        start: Called to start a process, as `WorkerProcess`.
    """

    command: Sequence[str]
    num_processes: int
    devices_per_process: int | None
    restarts: int
    write: Callable[[int | None, str], None]
    spares: int = 0
    hosts: Hosts = dataclasses.field(default_factory=Hosts)
    start: Callable[..., Worker] = WorkerProcess

    def run(self) -> int:
        """Runs the program to its end, with restarts; returns the exit code for this process."""
        with receive_wakeups() as wakeups, tempfile.TemporaryDirectory(prefix="tpudist-") as cache:
            return self.run_attempts(wakeups, cache)

    def run_attempts(self, wakeups: Wakeups, cache: str) -> int:
        """Same as `run`, with these wakeups and this folder for compiled programs."""
        left = self.restarts
        # Ends, because each turn returns or uses one of the restarts.
        while True:
            attempt = _Attempt(self, left, cache)
            codes = attempt.run(wakeups)
            if signals := wakeups.signals:  # first: the codes that they cause look like losses
                return EXIT_INTERRUPTED if signals[0] == signal.SIGINT else EXIT_PREEMPTED
            exit_code = self._conclude(attempt, codes)
            if exit_code is not None:
                return exit_code
            left = attempt.restarts_left - 1

    def _conclude(self, attempt: "_Attempt", codes: Mapping[int, int]) -> int | None:
        """Reports the end of an attempt; returns the exit code, or None for another attempt."""
        if attempt.gave_up:
            self.write(None, attempt.gave_up)
            return EXIT_GAVE_UP
        if not any(codes.values()):
            return 0
        # In the order of the ends: the first failure is the cause, and processes that lost that one
        # ended after it.
        first, code = next((i, x) for i, x in codes.items() if x)
        end, left = f"process {first} {_describe(code)}", attempt.restarts_left
        if attempt.failed and may_restart(code):
            self.write(None, f"{end}, because {attempt.failed}.")
            return EXIT_USER_ERROR
        if attempt.is_done:
            self.write(None, f"{end}, after tpudist.experimental.survive.")
            return _shell_code(code)
        if not may_restart(code):
            self.write(
                None, f"{end}: this is an error of the program, so a restart would fail again."
            )
            return _shell_code(code)
        if not left:
            self.write(None, f"{end}: {self._last_words}")
            return EXIT_GAVE_UP if self.restarts else _shell_code(code)
        self.write(None, f"{end}: restarting all processes ({left} restart(s) left).")
        return None

    @property
    def _last_words(self) -> str:
        if self.restarts:
            return f"giving up after {self.restarts} restart(s)."
        return "giving up. --restarts N starts again from the last checkpoint."


class _Attempt:
    """One run of all processes, from their start to their end.

    If the program survives losses, a lost process does not end the attempt.

    Attributes:
        restarts_left: Number of restarts that are left.
        gave_up: Reason why the remaining processes cannot continue, or "".
        failed: Error of the program that ends the run, or "".
    """

    def __init__(self, launch: Launch, restarts_left: int, cache: str):
        self.restarts_left, self.gave_up, self.failed = restarts_left, "", ""
        self._launch, self._cache = launch, cache
        self._workers: list[Worker] = []
        # Numbers of processes whose end was handled, and the exit codes that count.
        self._ended: set[int] = set()
        self._codes: dict[int, int] = {}
        self._deadline = math.inf  # by which all processes must end
        self._waits_since_s = math.inf
        self._numbers = launch.hosts.numbers(launch.num_processes)
        self._stopped_since_s: dict[int, float] = {}
        self._serves_others = False
        self._cluster = {"worker": launch.hosts.processes(launch.num_processes)}
        self._membership = self._create_membership()

    def run(self, wakeups: Wakeups) -> dict[int, int]:
        """Returns the exit codes in the order in which processes ended, without replaced ones."""
        try:
            for _ in range(self._launch.num_processes + self._launch.spares):
                self._start()
            self._wait(wakeups)
        finally:
            for worker in self._workers:
                worker.kill()
            self._membership.close()
        return self._codes

    def _create_membership(self) -> Membership | RemoteMembership:
        launch, hosts = self._launch, self._launch.hosts
        host, secret = hosts.names[0], hosts.secret()

        def write(line: str) -> None:
            launch.write(None, line)

        # There is a server even if the program never calls `survive`, because that is not known
        # before the start. `is_used` tells the two apart later.
        if hosts.is_first:
            count = launch.num_processes * len(hosts.names)
            cluster = self._cluster["worker"]
            return Membership(host, count, write, port=hosts.port, secret=secret, cluster=cluster)
        assert secret is not None, "there are several hosts"
        return RemoteMembership(host, hosts.port, secret, write)

    @property
    def is_done(self) -> bool:
        """Whether a program that survives losses has returned in all of its processes."""
        return self._membership.is_done

    def _start(self) -> None:
        index = next(self._numbers)
        self._membership.follow(index)
        task = {"cluster": self._cluster, "task": {"type": "worker", "index": index}}
        env = {
            # A spare's index is outside of this cluster. `survive` sets TF_CONFIG again for each
            # generation that the process joins.
            "TF_CONFIG": json.dumps(task),
            supervisor_variables.SUPERVISOR_VARIABLE: f"{self._membership.address} {index}",
            supervisor_variables.COMPILE_CACHE_VARIABLE: self._cache,
            supervisor_variables.FOLDER_VARIABLE: os.getcwd(),
        }
        if devices := self._launch.devices_per_process:
            env |= emulation.environment_of(devices)
        self._workers.append(
            self._launch.start(index, self._launch.command, env, self._launch.write)
        )

    def _wait(self, wakeups: Wakeups) -> None:
        # Ends when every process has ended. The deadline bounds that: it is set when a process
        # fails for good, when the program is done, or by a signal. A second signal kills all at
        # once.
        is_forwarded, signals = False, wakeups.signals
        while self._must_wait(signals):
            self._collect_ended(signals)
            if self._membership.is_done:
                self._end_within(END_S)
            self._check_membership()
            self._kill_stopped()
            if signals and not is_forwarded:
                is_forwarded = True
                self._end_within(GRACE_S)
                self._forward(signal.Signals(signals[0]))
            if this_host().monotonic() > self._deadline or len(signals) > 1:
                self._kill_late()
            if self._must_wait(signals) and wakeups.wait(_CHECK_S):
                # A process that lost another one may be reported before it.
                this_host().sleep(_SETTLE_S)

    def _must_wait(self, signals: list[int]) -> bool:
        """Whether processes run here, or the first host still serves those of other hosts."""
        if self.gave_up or len(self._ended) < len(self._workers):
            return not self.gave_up
        is_over = self._membership.is_done or self.failed or len(signals) > 1
        if not self._serves_others or is_over or this_host().monotonic() > self._deadline:
            return False
        if self._membership.has_members:
            return True
        if not signals:
            self.gave_up = "giving up: no process of this run is left."
        return False

    def _collect_ended(self, signals: list[int]) -> None:
        """Handles the processes that have ended since the last call."""
        # A process that lost another one ended after it, so it is handled after it. But it is
        # looked up before: then the lost one is among the others that have ended.
        lost = [x for x in self._workers if x.exit_code == EXIT_PEER_LOST]
        others = [x for x in self._workers if x.exit_code not in (None, EXIT_PEER_LOST)]
        for worker in [*others, *lost]:
            code = worker.exit_code
            assert code is not None
            if worker.index in self._ended:
                continue
            self._ended.add(worker.index)
            if not signals and self._handle_loss(worker.index, code):
                continue
            self._codes[worker.index] = code
            if code:
                self._end_within(END_S)

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, this_host().monotonic() + seconds)

    def _forward(self, number: signal.Signals) -> None:
        """Asks all processes to end."""
        if number == signal.SIGTERM and self._membership.is_used:
            self._membership.end_all()
            return
        for worker in self._workers:
            worker.send(number)

    def _kill_late(self) -> None:
        late = [worker for worker in self._workers if worker.exit_code is None]
        if late:
            processes = format_members("process", (worker.index for worker in late))
            self._launch.write(None, f"killing {processes}, still running.")
        for worker in late:
            worker.kill()

    def _handle_loss(self, index: int, code: int) -> bool:
        """Returns whether the others continue without a process; may start a replacement."""
        # Without `survive`, a loss ends the attempt. With it, an error of the program (1) would
        # repeat in every process, so it ends the attempt too, unless a spare failed before it
        # joined.
        membership = self._membership
        survives = membership.is_used or self._is_additional(index)
        if code == 0 or not survives or self.failed or membership.lost:
            return False
        if membership.is_done:  # a replacement may have started when the program returned
            return not membership.has_finished(index)
        end = f"process {index} {_describe(code)}"
        if not may_restart(code):
            if membership.is_member(index) or not self._is_additional(index):
                return False
            self._launch.write(None, f"{end} before it joined the others, which continue.")
            return True
        # A host without processes only helps if other hosts have some, and it may start one, or it
        # is the first one, with the membership and the coordination service of the others.
        hosts = self._launch.hosts
        if all(x.exit_code is not None for x in self._workers):
            self._serves_others = hosts.is_first and len(hosts.names) > 1
            can_rejoin = len(hosts.names) > 1 and self.restarts_left > 0
            if not can_rejoin and not self._serves_others:
                return False
        if self.restarts_left:
            self._start()
            self._launch.write(
                None,
                f"{end}: the others continue, and process {self._workers[-1].index} starts "
                f"({self.restarts_left} restart(s) left).",
            )
            self.restarts_left -= 1
        else:
            self._launch.write(None, f"{end}: the others continue.")
        return True

    def _is_additional(self, index: int) -> bool:
        """Returns whether a process is a spare or a replacement."""
        return index >= self._launch.num_processes * len(self._launch.hosts.names)

    def _kill_stopped(self) -> None:
        """Kills stopped processes if the program survives losses: the others do not wait."""
        now = this_host().monotonic()
        for worker in self._workers if self._membership.is_used else ():
            if not worker.is_stopped or not self._membership.is_member(worker.index):
                self._stopped_since_s.pop(worker.index, None)
            elif now - self._stopped_since_s.setdefault(worker.index, now) > STOPPED_S:
                self._launch.write(
                    None,
                    f"process {worker.index} has been stopped by SIGSTOP or Ctrl-Z for "
                    f"{STOPPED_S:g} s: killing it. The others do not wait for it.",
                )
                worker.kill()

    def _check_membership(self) -> None:
        """Gives up if the remaining processes are too few and no other can join them."""
        membership = self._membership
        self.gave_up = membership.gave_up
        if membership.lost:
            # The processes of this host lose it, too. Each prints the reason, and ends.
            self._end_within(END_S)
            if len(self._ended) == len(self._workers):
                self.gave_up = membership.lost
        if membership.failed and not self.failed:
            self.failed = membership.failed
            self._end_within(END_S)  # each ends by itself, with a verdict of its watch
            if not self._launch.hosts.is_first:  # which has reported it
                self._launch.write(None, f"{self.failed}. All processes end.")
        count = membership.waits_for_others()
        is_starting = any(
            worker.exit_code is None and not membership.is_member(worker.index)
            for worker in self._workers
        )
        if not count or is_starting or membership.ends_all:
            self._waits_since_s = math.inf
            return
        self._waits_since_s = min(self._waits_since_s, this_host().monotonic())
        if this_host().monotonic() - self._waits_since_s > _PATIENCE_S:
            self.gave_up = (
                f"{count} process(es) are left, but the program cannot continue with this number "
                f"(survive(processes=...)), and no restart is left: giving up."
            )


def _describe(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed ({signal.Signals(-code).name})"
    return f"was killed (signal {-code})"


def _shell_code(code: int) -> int:
    """Returns the code by which a shell reports an end: 128 plus the number of a signal."""
    return code if code > 0 else 128 - code


def may_restart(exit_code: int) -> bool:
    """Whether a restart may help a process that ended with this code."""
    return exit_code < 0 or exit_code in (EXIT_PEER_LOST, EXIT_PREEMPTED)
