"""Differences among the reports of all processes, against a definition that compares all pairs."""

import json
import math

import pytest
from hypothesis import given, settings, strategies as st

from tpudist.processes import run_order
from tpudist.processes.judge import process_difference
from tpudist.processes.judge.process_difference import find_difference
from tpudist.processes.judge.process_reports import OrderReport, Report
from tpudist.processes.run_order import STARTING


def make_report(index, orders, state="running"):
    """Returns the report of a process with these runs in each order."""
    names = {
        name: {str(number): f"{name}{number} of {index}" for number, _, _ in runs}
        for name, runs in orders.items()
    }
    reports = {name: OrderReport.of(runs) for name, runs in orders.items()}
    return Report(index, 0, state, reports, json.dumps({"names": names}))


def runs_of(calls, start=0, most=run_order.MAX_RUNS, *, is_starting=False):
    """Returns the last runs that a process remembers of these calls."""
    runs = []
    for position, number in enumerate(calls, start):
        if runs and runs[-1][0] == number:
            runs[-1][2] += 1
        else:
            runs.append([number, position, 1])
    runs = [tuple(run) for run in runs[-most:]]
    end = start + len(calls)
    return [*runs, (STARTING, end, 1)] if is_starting else runs


def find_by_pairs(reports):
    """Returns the expected positions and processes: the definition, in n * n comparisons."""
    for later, j in enumerate(reports):
        for i in reports[:later]:
            for name in i.orders:
                if name not in j.orders:
                    continue
                known = [
                    {
                        p: n
                        for n, start, times in x.orders[name].runs
                        for p in range(start, start + times)
                    }
                    for x in (i, j)
                ]
                shared = [p for p in known[0] if STARTING not in (known[0][p], known[1].get(p, 0))]
                different = [p for p in shared if known[0][p] != known[1][p]]
                if different:
                    return "differ", min(different), i.process, j.process
                for one, other in ((i, j), (j, i)):
                    if one.state == "ended" and one.orders[name].length < other.orders[name].length:
                        return "ended", one.orders[name].length, one.process, other.process
    return None


def expect(reports):
    """Returns the words that the message must have, or None."""
    match find_by_pairs(reports):
        case None:
            return None
        case "differ", position, i, j:
            return [f"at call {position + 1} of", f"Process {i}: ", f" of {i}; Process {j}: "]
        case _, calls, i, j:
            return [f"Process {i} ended after {calls} shared", f"but process {j} has started"]


numbers = st.sampled_from([1, 2, 12, -1])


@st.composite
def report_sets(draw):
    """Draws processes that are at different places of one program; a few leave it."""
    common = {name: draw(st.lists(numbers, max_size=24)) for name in "ab"}
    reports = []
    for index in range(draw(st.integers(2, 7))):
        orders = {}
        for name in draw(st.sampled_from(["a", "a", "ab", "ba", "b", ""])):
            calls = common[name][: draw(st.integers(0, 24))]
            if calls and draw(st.integers(0, 9)) == 0:
                calls[draw(st.integers(0, len(calls) - 1))] = draw(numbers)
            most, is_starting = draw(st.integers(1, 6)), draw(st.booleans())
            orders[name] = runs_of(calls, 0, most, is_starting=is_starting)
        state = draw(st.sampled_from(["running", "running", "running", "ended", "failed"]))
        reports.append(make_report(index, orders, state))
    return reports


@settings(max_examples=400)
@given(report_sets())
def test_a_difference_is_found_as_by_comparing_all_pairs(reports):
    expected, text = expect(reports), find_difference(reports)
    assert (text == "") if expected is None else all(part in text for part in expected), text


def test_numbers_that_begin_with_the_same_digit_differ():
    reports = [make_report(i, {"a": runs_of([5, n, n])}) for i, n in enumerate((12, 1))]
    assert "at call 2 of their shared calls. Process 0: a12 of 0; Process 1: a1" in find_difference(
        reports
    )


@given(st.lists(numbers, max_size=30), st.integers(0, 1000), st.integers(1, 8), st.booleans())
def test_a_report_keeps_runs_when_it_travels(calls, start, most, is_starting):
    runs = runs_of(calls, start, most, is_starting=is_starting and bool(calls))
    report = make_report(3, {"a": runs})
    again = Report.decode(report.encode())
    assert again == report
    assert again.orders["a"].runs == runs
    assert again.orders["a"].length == run_order.length(runs)


def test_a_report_of_a_process_in_its_first_dispatch_has_one_call():
    report = OrderReport.of([(STARTING, 0, 1)])
    assert (report.start, report.end, report.length) == (0, 0, 1)
    assert report.runs == [(STARTING, 0, 1)]


def alternating(end, most=run_order.MAX_RUNS):
    """Returns the memory of a process that alternates two programs, before a position."""
    return [(1 + p % 2, p, 1) for p in range(max(0, end - most), end)]


def count_comparisons(monkeypatch, reports):
    """Returns the message, and how often two texts and two lists of runs were compared."""
    counts = {"texts": 0, "runs": 0}
    compare_texts, compare_runs = process_difference._overlaps_differ, run_order.first_difference

    def count_texts(*args):
        counts["texts"] += 1
        return compare_texts(*args)

    def count_runs(*args):
        counts["runs"] += 1
        return compare_runs(*args)

    with monkeypatch.context() as patch:
        patch.setattr(process_difference, "_overlaps_differ", count_texts)
        patch.setattr(run_order, "first_difference", count_runs)
        return find_difference(reports), counts


@pytest.mark.parametrize("spread", [0, 1, 7919])
def test_comparisons_grow_linearly_with_processes(monkeypatch, spread):
    """At `spread` 0 all processes are at one position; else each is at another one."""

    def count(n):
        ends = [1000 + i * spread % n for i in range(n)]
        reports = [make_report(i, {"a": alternating(end)}) for i, end in enumerate(ends)]
        message, counts = count_comparisons(monkeypatch, reports)
        assert message == ""
        assert counts["runs"] == 0  # no text is parsed
        return counts["texts"]

    few, many = count(16), count(4096)
    assert math.log(many / few) / math.log(4096 / 16) <= 1.1
    assert many < 4096


def test_a_difference_among_many_is_found_in_few_comparisons(monkeypatch):
    """This happens once in a run: the first process that differs is searched for."""

    def count(n):
        orders = [alternating(1000 + i % 50) for i in range(n)]
        orders[n - 3] = runs_of([9], 990)
        reports = [make_report(i, {"a": runs}) for i, runs in enumerate(orders)]
        message, counts = count_comparisons(monkeypatch, reports)
        assert f"at call 991 of their shared calls. Process 0: a1 of 0; Process {n - 3}" in message
        return counts["texts"] + counts["runs"]

    few, many = count(16), count(4096)
    assert math.log(many / few) / math.log(4096 / 16) <= 1.25  # n log n
