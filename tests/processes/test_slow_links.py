"""Simulated processes whose messages need seconds, and notices of many processes."""

import pytest

from simulation import growth
from simulation.network import Link
from simulation.outcomes import cause_of
from simulation.process import Process
from simulation.simulation import Simulation
from simulation.training import make_mesh, training
from tpudist.preemption.notice import Notice
from tpudist.processes import process_watch
from tpudist.processes.coordination import Channel
from tpudist.processes.judge import coordinator_silence
from tpudist.processes.judge.coordinator_silence import CoordinatorSilence
from tpudist.processes.judge.process_silence import SILENT_S


def run(program, count=3, latency_s=1e-4, seed=0, **options):
    simulation = Simulation(count, seed, link=Link(latency_s=latency_s), **options)
    assert simulation.run(program)
    return simulation.processes


def connected(program):
    """Returns a program whose processes JAX has connected, and which ends without the watch."""

    def run_connected(process: Process):
        process.simulation.connect_jax(process)
        program(process)

    return run_connected


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("latency_s", [0.4, 1.5])
def test_all_name_the_failed_process_on_a_link_slower_than_a_wait(latency_s, fails):
    """A round trip is 2 to 3 times as long. Reports are late, and others must wait for theirs."""

    def fail(process, step):
        if step == 30 and process.index == 1:
            raise ValueError("a defect of the program")

    for seed in range(4):
        program = training(make_mesh(3), 60, 1.0, fault=fail)
        processes = run(program, latency_s=latency_s, seed=seed, collectives_fail=fails)
        assert [cause_of(x) for x in (processes[0], processes[2])] == ["1", "1"], seed


@pytest.mark.parametrize("latency_s", [0.4, 1.5, 3.0])
def test_a_round_ends_on_a_link_slower_than_a_wait(latency_s):
    found = []

    def program(process):
        process.sleep(30.0 * process.index)  # the others wait
        found.append(Channel("round").exchange(str(process.index)))

    run(connected(program), latency_s=latency_s)
    assert found == [["0", "1", "2"]] * 3


def test_no_thread_of_the_watch_outlives_the_program_on_a_slow_link():
    """A thread in C++ at the end of Python would abort the process."""
    ended = []

    def program(process):
        watch = process_watch.watch()
        process.sleep(60.0 - 3 * process.index)  # process 0 has the service
        process.client = process.runtime = None  # as after `jax.distributed.shutdown`
        watch._at_exit()
        ended.extend(not x.is_alive() for x in watch._threads)
        process.cancel_at_exit(watch._at_exit)

    run(connected(program), count=8, latency_s=3.0)
    assert ended == 16 * [True]


@pytest.mark.parametrize("latency_s", [1e-4, 0.4, 1.5])
@pytest.mark.parametrize("closes", [False, True])
def test_a_notice_reaches_all(latency_s, closes):
    """Also if a process that has closed wrote the first text."""
    known = {}

    def program(process):
        notice = Notice("notice")
        process.sleep(20.0)
        if closes and process.index == 2:
            notice.close()
            return
        process.sleep(20.0)
        if process.index == 1:
            notice.give("SIGTERM")
        while notice.content is None:
            process.sleep(0.01)
        known[process.index] = process.simulation.scheduler.now_s
        process.sleep(60.0)
        notice.close()
        assert notice.content.process == 1

    run(connected(program), latency_s=latency_s)
    assert set(known) == ({0, 1} if closes else {0, 1, 2})


def test_the_first_of_two_notices_counts():
    contents = []

    def program(process):
        notice = Notice("notice")
        process.sleep(5.0)
        if process.index:
            notice.give("SIGTERM")
        process.sleep(5.0)
        contents.append(notice.content)

    run(connected(program))
    assert contents == [contents[0]] * 3
    assert contents[0].why == "SIGTERM"


def test_processes_without_a_notice_end_at_once():
    """The wait for a notice is longer in a large run, and the end does not wait for it."""
    ended_s = []

    def program(process):
        notice = Notice("notice")
        process.sleep(5.0)
        notice.close()
        ended_s.append(process.simulation.scheduler.now_s)

    run(connected(program), count=512)
    assert max(ended_s) < 5.5


def test_a_notice_takes_about_as_long_as_an_agreement():
    """Each process looks for it every 2.5 s, but does not learn of it only then."""
    costs = {
        operation.name: growth.measure(operation, 1024, measures_cpu=False)
        for operation in growth.OPERATIONS
        if "notice" in operation.name or "agreement" in operation.name
    }
    agreement, notice = costs.values()
    # The process that gives notice looks four times per second, and a step is 0.1 s long.
    assert notice.all_know_s < 2 * agreement.all_know_s + 0.25 + 0.1
    assert notice.messages <= 8


def test_a_silence_of_process_0_explains_a_failure_for_a_limited_time(monkeypatch):
    """A debugger has no limit, and the others ended only with process 0."""
    for silent_s, may in ((0.5, False), (10.0, True), (SILENT_S, True), (2 * SILENT_S, False)):
        silence = CoordinatorSilence(lambda: silent_s, 1.0)  # noqa: B023
        assert silence.may_have_a_cause() is may
    endless = type("Silence", (), {"limit_s": float("inf"), "warning": "", "text": ""})
    monkeypatch.setattr(coordinator_silence, "describe_silence", lambda *_: endless)
    silence = CoordinatorSilence(lambda: 1e6, 1.0)
    silence._since_s = float("-inf")
    assert silence.judge() is None
