"""Watches the processes of a run, so that no process waits forever for another one.

Twice a second a thread of each process reports, on the host, which shared calls the process has
begun (`run_order`), whether it has ended, and the exception that ended it. Process 0 compares the
reports (`process_judge`). If two processes have begun different calls at the same position, if one
has ended, failed or fallen silent, every process gets a verdict, prints it, and ends: the
collectives in which they wait would never return. A step pays for this with one counter.

The texts go through JAX's coordination service, which runs in process 0:

| key | writer | meaning |
|---|---|---|
| `tpudist/watch/report/<i>` | process i, repeatedly | its state; see `Report` |
| `tpudist/watch/verdict` | process 0, repeatedly | why all must end, or: all have ended |
| `tpudist/watch/peers` | process 0, once | where to connect; see `peer_connections` |
| `tpudist/watch/gone/<i>` | process i, last | it has its verdict and exits |

A process acts on the first verdict that it reads. Process 0 may write a later one with another
cause, for example after a process that failed has also lost its connection.
"""

import itertools
import json
import logging
from collections.abc import Callable
from typing import NoReturn

from tpudist.errors import ProcessesDifferError, ProcessFailedError
from tpudist.goodput import goodput
from tpudist.processes import generations, process_state
from tpudist.processes.coordination import KeyValueClient
from tpudist.processes.exit_codes import EXIT_PEER_LOST
from tpudist.processes.host import this_host
from tpudist.processes.judge.coordinator_silence import CoordinatorSilence, ReportAge
from tpudist.processes.judge.process_judge import HOLD_S, START_AGAIN, Judge, report_interval_s
from tpudist.processes.judge.process_reports import ALL_ENDED, Details, OrderReport, Report, Verdict
from tpudist.processes.judge.process_silence import WARN_S
from tpudist.processes.peer_connections import DEAD_PEER_S, PeerConnections
from tpudist.processes.process_exit import (
    exit_now,
    print_all_threads,
    print_error,
    raise_in_program,
    stack_of_program,
)
from tpudist.processes.program_outcome import ProgramOutcome
from tpudist.processes.reported_wait import ReportedWait
from tpudist.processes.run_order import RunOrder

_log = logging.getLogger("tpudist")

GRACE_S = 2.0
"""Seconds between the exception that is raised in a process that must end, and its end."""
_CONNECT_MS = 20_000  # for process 0 to listen
# A wait in C++ does not notice `_closing`, so it is cut into slices. In a large run a slice lasts
# as long as the interval of the reports, because process 0 answers each of them.
_SLICE_S = 1.0
_GONE_S = 0.5  # process 0 waits this much longer than `GRACE_S` for the others, which end then
_EXIT_S = 0.2  # for processes to exit after they have announced it
_KILLED = (
    "Process {} ended without a message: it was killed (by SIGKILL, or out of memory), it called "
    "os._exit, or its host or network failed."
)
_FOLDER = "tpudist/watch"
_REPORTS, _VERDICT = f"{_FOLDER}/report", f"{_FOLDER}/verdict"


def watch() -> "Watch":
    """Returns the watch of this process; the first call starts it. All processes must call it."""
    memory = this_host().memory
    if Watch not in memory:
        memory[Watch] = Watch()
    return memory[Watch]


@generations.at_end
def _end_watch() -> None:
    if (ended := this_host().memory.pop(Watch, None)) is not None:
        ended.abandon()


class Watch:
    """Reports this process to the others, and ends it after a verdict.

    Attributes:
        message: Reason for this process to end; empty while all is well.
    """

    # Four threads take part. The program's thread only adds to orders; `_report_repeatedly` reads
    # them and, in process 0, judges; `_listen` waits for the verdict; and a thread of
    # `PeerConnections` calls `_on_lost`. Nothing is locked: each attribute has one writer, or is
    # only set once.

    def __init__(self):
        self.message = ""
        client: KeyValueClient = this_host().coordination_client()
        self._client, self._index = client, this_host().process_index()
        self._count = this_host().process_count()
        self._orders: dict[str, tuple[RunOrder, Callable[[int], str]]] = {}
        self._exit_code, self._gives_up = 0, False  # of a verdict
        # Of the generation of this watch. A watch that was left behind must not report a loss with
        # the numbers of a later one.
        self._report_lost = generations.loss_reporter()
        self._beats = itertools.count()
        self._place = process_state.here()
        self._reported_lengths: dict[str, int] = {}
        self._progress_s = this_host().monotonic()  # when this process last began a shared call
        self._ended_together = this_host().event()
        self._closing = this_host().event()
        # In every process, though only process 0 judges: a wrong setting raises in each of them.
        self._judge = Judge(self._count)
        self._has_defect = False  # whether the judge has raised an exception
        self._peers = PeerConnections(self._index, self._on_lost)
        self._interval_s = report_interval_s(self._count)
        self._slice_s = max(_SLICE_S, self._interval_s)
        # Reports and looks at them are up to an interval apart.
        self._report_of_0 = ReportAge(2 * (self._slice_s - _SLICE_S))
        has_peers = self._report_lost is None
        measure = self._peers.silence_s if has_peers else self._report_of_0.seconds
        self._silence_of_0 = CoordinatorSilence(measure, max(self._slice_s, DEAD_PEER_S))
        self._round_trip_s = 0.0  # of the last report
        self._outcome = ProgramOutcome(self._index)
        self._threads = [
            this_host().start_thread(self._report_repeatedly, name="tpudist watch"),
            this_host().start_thread(self._listen, name="tpudist watch, verdict"),
        ]
        this_host().at_exit(self._at_exit)

    def follow(self, name: str, order: RunOrder, describe: Callable[[int], str]) -> None:
        """Includes an order in the reports.

        Args:
            name: Name of the order, the same in all processes that have it.
            order: The shared calls that this process has begun.
            describe: Called with the number of a shared call; returns a description of it.
        """
        self._orders[name] = order, describe

    def abandon(self) -> None:
        """Stops watching, because the processes of the run change."""
        self._closing.set()
        this_host().cancel_at_exit(self._at_exit)
        self._outcome.close()

    # Reports.

    def _report_repeatedly(self) -> None:
        while True:
            report = self._make_report()
            try:
                self._send(report)
            except Exception:  # jaxlib's type varies; `_listen` notices if the service is gone
                pass
            if self._closing.wait(self._interval_s):
                return

    def _make_report(self) -> Report:
        state = self._outcome.state  # first: the reason is there before "failed" is
        orders: dict[str, OrderReport] = {}
        names: dict[str, dict[str, str]] = {}
        for name, (order, describe) in list(self._orders.items()):
            runs = order.last_runs()
            orders[name] = OrderReport.of(runs)
            names[name] = {str(number): describe(number) for number in {run[0] for run in runs}}
        details: Details = {
            "why": self._outcome.why,
            "exit_code": self._outcome.exit_code,
            "names": names,
            "place": self._place,
        }
        lengths = {name: order.length for name, order in orders.items()}
        if lengths != self._reported_lengths:
            self._reported_lengths, self._progress_s = lengths, this_host().monotonic()
        elif this_host().monotonic() - self._progress_s > WARN_S / 2:
            # Others that wait get a warning after `WARN_S`, which is to contain the stack.
            details["stack"] = stack_of_program()
        return Report(self._index, next(self._beats), state, orders, json.dumps(details))

    def _send(self, report: Report) -> None:
        """Sends the report of this process; in process 0, also judges the reports of all."""
        begun_s = this_host().monotonic()
        self._client.key_value_set(f"{_REPORTS}/{self._index}", report.encode(), True)
        self._round_trip_s = this_host().monotonic() - begun_s
        if self._index or self._has_defect:
            return
        texts = self._client.key_value_dir_get(f"{_REPORTS}/")
        try:
            decoded = [Report.decode(text) for _, text in texts]
            verdict = self._judge.judge({report.process: report for report in decoded})
        except Exception:
            # `_report_repeatedly` takes errors for those of the service, so it would hide this one.
            self._has_defect = True
            _log.exception(
                "Process 0 cannot compare the reports of the processes, because of a defect in "
                "tpudist. It no longer names processes that are lost, late or different. Please "
                "report it."
            )
            return
        if verdict is not None and not self._ask_supervisor(verdict):
            self._pronounce(verdict)

    def _ask_supervisor(self, verdict: Verdict) -> bool:
        """Asks a supervisor, if any, to end the process that failed, so that others continue."""
        if verdict.exit_code != EXIT_PEER_LOST or self._report_lost is None:
            return False
        assert verdict.failed is not None, "a peer was lost"
        self._report_lost(verdict.failed, verdict.message)
        return True

    def _pronounce(self, verdict: Verdict) -> None:
        self._client.key_value_set(_VERDICT, verdict.encode(), True)

    # Verdicts.

    def _connect_peers(self) -> None:
        """Connects the processes; without that, a killed process is only noticed by its silence."""
        host_of_0, key = this_host().coordinator_host(), f"{_FOLDER}/peers"
        try:
            if self._index:
                text = self._client.blocking_key_value_get(key, _CONNECT_MS)
                port_and_secret, self._silence_of_0.place = json.loads(text)
                self._peers.connect(host_of_0, port_and_secret)
            else:
                text = json.dumps([self._peers.listen(host_of_0), self._place])
                self._client.key_value_set(key, text, True)
        except Exception as error:  # of the network or of the service, whose type varies
            _log.info("Process %d has no connection to the others: %s", self._index, error)

    def _on_lost(self, index: int, gave_up: bool) -> None:
        """Reports another process that was killed, unless this one ends already.

        If that process gave up this one, which was silent, this one is the cause.

        A process that exits after a verdict ends its connection without a farewell (`exit_now`),
        like a process that was killed. By then this process has the verdict, too.
        """
        if self.message or self._closing.is_set() or self._has_left():
            return
        text, failed = _KILLED.format(index), index
        if gave_up:
            silence = f"Process 0 ({process_state.describe(self._place)}) has not reported for long"
            text, failed = f"{silence}, so process {index} ended.", 0
        verdict = Verdict(f"{text} {START_AGAIN}", EXIT_PEER_LOST, failed=failed)
        if self._index:
            # It was process 0, and with it JAX's service: JAX aborts this process within 0.2 to
            # 1.5 s, so there is no time for an exception in the program.
            print_error(f"[tpudist p{self._index}] {verdict.message}")
            exit_now(EXIT_PEER_LOST)
        try:
            self._pronounce(verdict)
        except Exception:  # this process ends, too; jaxlib's type varies
            pass

    def _listen(self) -> None:
        """Waits for a verdict, and ends this process unless all have ended well."""
        # A supervisor notices a death itself, and the other processes continue.
        if self._report_lost is None:
            self._connect_peers()
        verdict = self._wait_for_verdict()
        if verdict is None:
            return
        if verdict.message == ALL_ENDED:
            self._ended_together.set()
        else:
            self._end(verdict)

    def _wait_for_verdict(self) -> Verdict | None:
        """Returns the verdict; None if the watch closes, or the program leaves the run.

        Process 0 writes one in the end. If it cannot, because it is dead or stopped, this process
        comes to a verdict of its own: the service fails, or process 0 is silent.
        """
        while not self._closing.is_set():
            # An answer that needs longer than the slice on its way would never be read.
            slice_s = max(self._slice_s, min(2 * self._round_trip_s, DEAD_PEER_S))
            try:
                text = self._client.blocking_key_value_get(_VERDICT, int(1000 * slice_s))
                return Verdict.decode(text)
            except Exception as error:  # jaxlib's type varies; the text has the status
                if "DEADLINE_EXCEEDED" in str(error):
                    self._read_report_of_0()
                    verdict = self._silence_of_0.judge()
                    if verdict and not self._ask_supervisor(verdict):
                        return verdict
                    continue
                # In the time of one report, the program itself may turn out to have left.
                if self._closing.wait(self._interval_s) or self._has_left():
                    return None
                return Verdict(
                    f"Cannot reach process 0, which coordinates this run "
                    f"({str(error).splitlines()[0][:200]}). It was killed, or the network "
                    f"failed. {START_AGAIN}",
                    EXIT_PEER_LOST,
                    failed=0,
                )
        return None

    def _read_report_of_0(self) -> None:
        """Looks whether process 0 still reports, if there is no connection that would show it."""
        if self._report_lost is None or not self._index:
            return
        try:
            text = self._client.key_value_try_get(f"{_REPORTS}/0")
        except Exception:  # there is none yet, or the service is gone; jaxlib's type varies
            return
        self._report_of_0.read(text)
        self._silence_of_0.place = Report.decode(text).details["place"]

    def _end(self, verdict: Verdict) -> None:
        """Raises in the program, which may handle it for `GRACE_S`; then ends the process."""
        # If the message is about the failure of this process, Python has printed the traceback. A
        # collective may also have failed because the others gave up this process.
        if self._outcome.state != "failed" or self._outcome.why not in verdict.message:
            print_error(f"[tpudist p{self._index}] {verdict.message}")
        self._outcome.has_verdict = True
        # First: `_at_exit` may end the process after a message.
        self._exit_code, self._gives_up = verdict.exit_code, verdict.process_0_is_silent
        self.message = verdict.message
        goodput.flush()
        goodput.note("verdict", message=verdict.message)
        if self._outcome.state == "running":
            print_error(f"Process {self._index} was at:\n{stack_of_program()}")
            if verdict.all_threads:
                print_all_threads()
            differ = verdict.failed is None
            error = ProcessesDifferError if differ else ProcessFailedError
            raise_in_program(error, verdict.message)
        this_host().sleep(GRACE_S)  # a thread that waits in C++ does not notice the exception
        if not self._closing.is_set():  # else a supervisor has ended the generation meanwhile
            self._leave()

    # The end of this process.

    def _at_exit(self) -> None:
        """Waits for the other processes to end, or for the verdict that they cannot.

        Runs before JAX's exit handler, which would wait for minutes without naming anybody: atexit
        is last in, first out, and JAX registered its handler when it connected the processes.
        """
        if self._has_left():
            self._close()
            return
        if self._outcome.state == "running":
            self._outcome.state = "ended"
        self._wait_for_the_others()
        if self._ended_together.is_set():
            self._close()
        elif self.message:
            self._leave()
        else:  # process 0 does not answer
            exit_now(self._outcome.exit_code)

    @goodput.count_as(goodput.Phase.WAIT)
    def _wait_for_the_others(self) -> None:
        wait = ReportedWait(5.0)
        # A failed process stays until its report has been judged (`HOLD_S`, and some intervals)
        # and the others have got the verdict; then it does not depend on them.
        most_s, since_s = HOLD_S + 3 * (self._interval_s + self._round_trip_s) + GRACE_S, 0.0
        while not self._ended_together.wait(0.02):
            if self._outcome.has_failed_collective and self._silence_of_0.may_have_a_cause():
                since_s = wait.waited_s  # if process 0 is reached again, it judges only then
            is_late = wait.waited_s - since_s > most_s
            if self.message or (self._outcome.state == "failed" and is_late):
                break
            wait.report(lambda: f"Process {self._index} has ended and waits for the others to end")

    def _has_left(self) -> bool:
        """Whether the program itself has left the run, by `jax.distributed.shutdown`."""
        return this_host().coordination_client() is not self._client

    def _close(self) -> None:
        """Ends the threads. A thread in C++ when Python ends would abort the process."""
        self._closing.set()
        self._peers.close()
        for thread in self._threads:
            thread.join(3 * self._slice_s + DEAD_PEER_S)  # the longest wait for a verdict

    def _leave(self) -> NoReturn:
        """Ends this process; process 0 ends last."""
        if self._gives_up:  # nobody would read a farewell
            self._peers.give_up()
            exit_now(self._exit_code)
        # Process 0 has the service, and JAX aborts the processes that lose it. So the others
        # announce that they exit, and process 0 waits for them: a little longer than their grace
        # time, because a dead process announces nothing, and then a moment for their exit.
        try:
            if self._index:
                self._client.key_value_set(f"{_FOLDER}/gone/{self._index}", "", True)
            else:
                deadline = this_host().monotonic() + GRACE_S + _GONE_S
                while this_host().monotonic() < deadline:
                    gone = self._client.key_value_dir_get(f"{_FOLDER}/gone/")
                    if len(gone) >= self._count - 1:
                        break
                    this_host().sleep(0.05)
                this_host().sleep(_EXIT_S)
        except Exception:  # the service is gone; jaxlib's type varies
            pass
        exit_now(self._exit_code)
