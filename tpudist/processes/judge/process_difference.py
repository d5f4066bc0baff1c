"""Finds two processes whose shared calls differ, in the reports of all processes.

Each round compares every process with one other, as texts. Only if something differs are pairs
searched, so that the message names the first pair.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Sequence

from tpudist.processes import run_order
from tpudist.processes.judge.process_reports import OrderReport, Report

_RULE = (
    "They would wait for each other forever, or compute with values of different calls. All "
    "processes of a run must do the same things in the same order."
)


def find_difference(reports: Sequence[Report]) -> str:
    """Returns how two processes differ, or "" if no difference is known yet.

    Args:
        reports: Reports in order of the index of their process.

    Returns:
        A text about the first process that differs from an earlier one, and the first of those.
    """
    if not _differ(reports):
        return ""
    # More reports never hide a difference, so a binary search finds the first that shows one.
    later = bisect.bisect_left(range(len(reports)), True, key=lambda i: _differ(reports[: i + 1]))
    pairs = (_compare(earlier, reports[later]) for earlier in reports[:later])
    return next(filter(None, pairs))


def describe_last_calls(report: Report) -> str:
    """Returns the last call of each order of a process, as a sentence; "" without a call."""
    names = report.details["names"]
    calls = [
        f"{names[name][str(order.runs[-1][0])]} (call {order.length})"
        for name, order in report.orders.items()
        if order.length
    ]
    return f"Its last calls: {', '.join(calls)}. " if calls else ""


def _differ(reports: Sequence[Report]) -> bool:
    """Whether two processes differ in an order that both follow; see `_compare`."""
    orders: defaultdict[str, list[OrderReport]] = defaultdict(list)
    ended: dict[str, int] = {}  # the least length in a process that has ended
    for report in reports:
        for name, order in report.orders.items():
            orders[name].append(order)
            if report.state == "ended":
                ended[name] = min(ended.get(name, order.length), order.length)
    return any(
        (name in ended and ended[name] < max(x.length for x in same)) or _calls_differ(same)
        for name, same in orders.items()
    )


def _calls_differ(orders: list[OrderReport]) -> bool:
    """Whether two processes remember different calls at one position of an order."""
    # A process remembers the calls from `start` to `end`. In the order of `start`, each is compared
    # with the one before it that remembers most, `furthest`. That suffices: at a position that a
    # process shares with any earlier one, `furthest` remembers a call, too, because it starts
    # earlier and ends later. And there `furthest` is equal to the earlier one already.
    orders = sorted(orders, key=lambda order: order.start)
    furthest = orders[0]
    for order in itertools.islice(orders, 1, None):
        if order.start < furthest.end and _overlaps_differ(furthest, order):
            return True
        if order.end > furthest.end:
            furthest = order
    return False


def _overlaps_differ(first: OrderReport, second: OrderReport) -> bool:
    """Whether two orders differ where both remember a call; `second` starts at or after `first`."""
    # The text after the start of `second` is the same in both, up to the last run of the shorter
    # one. That run may have grown since, but not have ended earlier.
    at = first.text.find(f";{second.start},")
    if at >= 0:
        longer, shorter = (first.text[at:], second.text)
        end = second.end
        if second.end > first.end:
            longer, shorter, end = shorter, longer, first.end
        if longer.startswith(shorter):
            rest = longer[len(shorter) :]
            if not rest or (rest[0] == ";" and int(rest[1 : rest.index(",")]) >= end):
                return False
    # Rare: they differ, or one of them has forgotten the beginning of a run.
    return run_order.first_difference(first.runs, second.runs) is not None


def _compare(i: Report, j: Report) -> str:
    """Returns how two processes differ; "" if they do not."""
    for name, order_i in i.orders.items():
        order_j = j.orders.get(name)
        if order_j is None:
            continue
        difference = run_order.first_difference(order_i.runs, order_j.runs)
        if difference is not None:
            position, number_i, number_j = difference
            return (
                f"The processes differ at call {position + 1} of their shared calls. Process "
                f"{i.process}: {i.details['names'][name][str(number_i)]}; Process {j.process}: "
                f"{j.details['names'][name][str(number_j)]}. {_RULE}"
            )
        if text := _compare_end(name, i, j) or _compare_end(name, j, i):
            return text
    return ""


def _compare_end(name: str, ended: Report, active: Report) -> str:
    """Returns that a process ended before another began its last calls, or ""."""
    num_ended, num_active = ended.orders[name].length, active.orders[name].length
    if ended.state != "ended" or num_ended >= num_active:
        return ""
    return (
        f"Process {ended.process} ended after {num_ended} shared call(s), but process "
        f"{active.process} has started {num_active}. {describe_last_calls(active)}{_RULE} Loops "
        f"must have the same length, as loops over distributed datasets do."
    )
