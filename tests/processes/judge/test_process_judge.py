"""The judge of process reports, with a clock that tests move."""

import json
import logging

import pytest

from tpudist.processes import host, process_state
from tpudist.processes.judge import process_judge
from tpudist.processes.judge.process_judge import Judge
from tpudist.processes.judge.process_reports import OrderReport, Report


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(host.Host, "monotonic", lambda self: Clock.now)
    return Clock


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "tpudist")
    return lambda: [x.getMessage() for x in caplog.records]


def make_report(beat, calls=1, *, state="running", orders=None, **details):
    """Returns the report of a process; `orders` maps names to runs and their descriptions."""
    if orders is None:
        orders = {"a": ([(7, 0, calls)] if calls else [], {"7": "Strategy.run of 'f'"})}
    details = {"why": "", "exit_code": 1, "place": process_state.here()} | details
    details["names"] = {name: names for name, (_, names) in orders.items()}
    reports = {name: OrderReport.of(runs) for name, (runs, _) in orders.items()}
    return Report(-1, beat, state, reports, json.dumps(details))


def number(reports):
    """Returns reports with the indices that are their keys."""
    return {i: report._replace(process=i) for i, report in reports.items()}


def run(judge, clock, seconds, reports):
    """Judges twice a second until there is a verdict."""
    for i in range(int(2 * seconds)):
        clock.now += 0.5
        if verdict := judge.judge(number(reports(i))):
            return (i + 1) / 2, verdict
    return None, None


def test_a_lagging_process_is_named_and_ends_the_run_after_a_timeout(clock, warnings, monkeypatch):
    monkeypatch.setenv("TPUDIST_HANG_TIMEOUT_S", "30")
    seconds, verdict = run(
        Judge(2),
        clock,
        60,
        lambda i: {0: make_report(i, 5), 1: make_report(i, 4, stack="  File x, line 3")},
    )
    assert 30 < seconds < 32
    assert verdict.exit_code == 75
    assert verdict.all_threads
    assert "to start Strategy.run of 'f' (call 5)." in verdict.message
    assert len(warnings()) == 3  # after 4, 8 and 16 s
    assert "It is at:\n  File x, line 3\nAfter 30 s all processes end" in warnings()[0]


def test_a_slow_process_only_causes_warnings(clock, warnings, monkeypatch):
    monkeypatch.setenv("TPUDIST_HANG_TIMEOUT_S", "30")

    def reports(i):
        return {0: make_report(i, 5 + i // 20), 1: make_report(i, 4 + i // 20)}  # a call every 10 s

    assert run(Judge(2), clock, 600, reports) == (None, None)
    assert 4 <= len(warnings()) <= 12  # of 60 calls


def test_processes_that_wait_together_do_not_lag(clock, warnings):
    assert run(Judge(2), clock, 2000, lambda i: {0: make_report(i, 5), 1: make_report(i, 5)}) == (
        None,
        None,
    )
    assert not warnings()


def test_an_order_of_one_process_causes_no_lag(clock, warnings):
    def reports(i):
        return {0: make_report(i, 5), 1: make_report(i, 0, orders={})}

    assert run(Judge(2), clock, 2000, reports) == (None, None)


def test_processes_that_end_or_differ_are_found_among_equal_ones(clock):
    def reports(last):
        return number({**{i: make_report(i, 5) for i in (0, 1, 10, 2)}, 3: last})

    assert Judge(5).judge(reports(make_report(0, 5))) is None
    ended = Judge(5).judge(reports(make_report(0, 4, state="ended")))
    assert "Process 3 ended after 4 shared call(s), but process 0 has started 5" in ended.message
    order = [(8, 0, 1)], {"8": "another"}
    differs = Judge(5).judge(reports(make_report(0, orders={"a": order})))
    assert "Process 0: Strategy.run of 'f'; Process 3: another" in differs.message


@pytest.mark.parametrize(("state", "limit"), [("STOPPED", 20), ("RUNNING", 90), (None, 90)])
def test_a_silent_process_ends_the_run_after_a_limit(clock, warnings, monkeypatch, state, limit):
    kernel_state = state and process_state.State[state]
    monkeypatch.setattr(process_state, "find", lambda place: kernel_state)
    seconds, verdict = run(Judge(2), clock, 200, lambda i: {0: make_report(i), 1: make_report(0)})
    assert limit < seconds < limit + 2
    assert verdict.failed == 1
    assert "Process 1" in warnings()[0]


def test_a_process_of_a_large_run_is_not_blamed_between_its_reports(clock, warnings):
    """Each of 5,000 processes reports every 5.5 s, which is silence in a small run."""
    error = "jax.errors.JaxRuntimeError: Connection closed by peer"

    def reports(i):
        failed = make_report(0, state="failed", why=error, exit_code=1)
        return {0: failed, 1: make_report(i // 11)}

    clock.now += 4
    _, verdict = run(Judge(5000), clock, 60, reports)
    assert verdict.failed == 0
    assert not warnings()


def test_a_silent_process_of_a_very_large_run_is_found(clock, warnings, monkeypatch):
    """Each of 30,000 processes reports every 30.5 s, and process 0 judges as seldom."""
    monkeypatch.setattr(process_state, "find", lambda place: None)
    judge = Judge(30_000)
    for i in range(10):
        clock.now += 30.5
        if verdict := judge.judge(number({0: make_report(i), 1: make_report(0)})):
            break
    assert verdict.failed == 1
    assert 90 < 30.5 * i < 90 + 2 * 30.5


def test_a_process_in_a_debugger_is_waited_for(clock, warnings, monkeypatch):
    monkeypatch.setattr(process_state, "find", lambda place: process_state.State.DEBUGGED)
    assert run(Judge(2), clock, 900, lambda i: {0: make_report(i), 1: make_report(0)}) == (
        None,
        None,
    )
    assert "a debugger has stopped it" in warnings()[0]


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan"])
def test_an_invalid_hang_timeout_raises(monkeypatch, text):
    monkeypatch.setenv("TPUDIST_HANG_TIMEOUT_S", text)
    with pytest.raises(ValueError, match="must be a number of seconds above 0"):
        process_judge.hang_timeout()


def test_a_process_in_a_debugger_does_not_hide_a_stopped_one(clock, warnings, monkeypatch):
    states = {"a": process_state.State.DEBUGGED, "b": process_state.State.STOPPED}
    monkeypatch.setattr(process_state, "find", lambda place: states[place.split(" ")[0]])

    def reports(i):
        debugged, stopped = (
            make_report(0, place="a 1 host"),
            make_report(min(i, 8), place="b 2 host"),
        )
        return {0: make_report(i), 1: debugged, 2: stopped}

    seconds, verdict = run(Judge(3), clock, 60, reports)
    assert verdict.failed == 2
    assert 20 < seconds < 30


def test_a_silent_process_does_not_hide_a_lagging_one(clock, warnings, monkeypatch):
    monkeypatch.setattr(process_state, "find", lambda place: process_state.State.DEBUGGED)
    monkeypatch.setenv("TPUDIST_HANG_TIMEOUT_S", "30")

    def reports(i):
        return {0: make_report(i, 5), 1: make_report(0, 5), 2: make_report(i, 4)}

    seconds, verdict = run(Judge(3), clock, 60, reports)
    assert verdict.failed == 2
    assert 30 < seconds < 32


def test_reports_over_a_slow_link_are_not_silence(clock, monkeypatch):
    """A round trip of 6 s. Else it would be the cause of each failure of another process."""
    monkeypatch.setattr(process_state, "find", lambda place: process_state.State.RUNNING)
    reports = {0: make_report(0), 1: make_report(0)}

    def report(i):
        beat = i // 12 if i < 120 else 9  # after a minute it is silent
        return {**reports, 0: make_report(i), 1: make_report(beat)}

    judge = Judge(2)
    seconds, verdict = run(judge, clock, 60, report)
    assert verdict is None
    assert judge._find_silences(number(report(119))) == []
    seconds, verdict = run(judge, clock, 120, lambda i: report(i + 120))
    assert verdict.failed == 1
    assert 90 < seconds < 100


def test_a_pause_delays_a_verdict_by_a_limited_time(clock, monkeypatch):
    """A process that was stopped for a minute, and is silent again, has no more time than this."""
    monkeypatch.setattr(process_state, "find", lambda place: process_state.State.RUNNING)
    judge = Judge(2)
    run(judge, clock, 60, lambda i: {0: make_report(i), 1: make_report(0)})
    seconds, verdict = run(
        judge, clock, 200, lambda i: {0: make_report(100 + i), 1: make_report(1)}
    )
    assert verdict.failed == 1
    assert 90 < seconds < 90 + 16
