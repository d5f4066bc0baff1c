"""The report of a search: terminals and notebooks show it in the same way as a plan."""

from __future__ import annotations

from collections.abc import Iterable

from tpudist.display.text_tables import Column, TextTable, format_source
from tpudist.planner.layouts.search_outcomes import (
    FAILED,
    FITS,
    NOT_COMPILED,
    NOT_REACHED,
    TOO_LARGE,
    Outcome,
    SearchOutcomes,
    counts_tokens,
)
from tpudist.planner.plan_notes import KEPT_ANSWER, OLD_LINES
from tpudist.planner.show.formats import (
    format_bytes,
    format_count,
    format_op,
    format_seconds,
    format_share,
    plural,
)
from tpudist.planner.show.report_parts import MEMORY, SPEED, STEP_TIME, Lines, Report
from tpudist.planner.show.speed_text import format_step
from tpudist.xla.estimate.step_time import TimeEstimate

_NUM_ESTIMATED = 10
"""Number of candidates to list that were estimated and not compiled."""
_NUM_LARGEST = 2
"""Number of the largest buffers to name for a candidate that is too large."""


def describe_search(result: SearchOutcomes) -> Report:
    """Returns the report of a search."""
    fitting, too_large = result.of(FITS), result.of(TOO_LARGE)
    num = len(result.outcomes)
    sections: list[TextTable | Lines] = []
    if fitting:
        sections.append(_table_of_fitting(fitting))
    if result.best and result.best.plan:
        notes = [x for x in result.best.plan.notes if x not in (KEPT_ANSWER, OLD_LINES)]
        sections += [Lines("Notes on the best", tuple(notes))] if notes else []
    if same := [f"{x.candidate.name}: as {x.same_as}" for x in fitting if x.same_as]:
        sections.append(Lines("The same program", tuple(same)))
    if close := _list_close_to_best(fitting):
        sections.append(Lines("Too close to the best to rank", close))
    if too_large:
        title = f"Does not fit ({len(too_large)} of {num})"
        sections.append(Lines(title, tuple(_describe_too_large(x, fitting) for x in too_large)))
    if failed := result.of(FAILED):
        lines = tuple(f"{x.candidate.name}: {x.reason}" for x in failed)
        sections.append(Lines(f"Failed ({len(failed)} of {num})", lines))
    if result.estimated:
        sections.append(_table_of_estimates(result.estimated))
    others = [x for x in result.of(NOT_REACHED) if x.estimate is None]
    if left := [x.candidate.name for x in others if x.reason == NOT_COMPILED]:
        title = f"Without an estimate and not compiled ({len(left)} of {num})"
        sections.append(Lines(title, ("; ".join(left),)))
    if late := [x for x in others if x.reason != NOT_COMPILED]:
        title = f"Not reached within {format_seconds(result.time_budget_s)} ({len(late)} of {num})"
        sections.append(Lines(title, tuple(_group_by_reason(late))))
    best = f"best on {result.topology}: {result.best.candidate.name}" if result.best else ""
    return Report(
        best or _title_without_result(result), bool(fitting), tuple(_facts(result)), tuple(sections)
    )


def _title_without_result(result: SearchOutcomes) -> str:
    if result.of(TOO_LARGE):
        return f"no candidate fits {result.topology}"
    if result.of(FAILED):
        return f"all that was tried for {result.topology} failed"
    if result.estimated:
        best = result.estimated[0].candidate.name
        return f"most promising on {result.topology}: {best}"
    if all(x.reason == NOT_COMPILED for x in result.outcomes):
        return f"nothing could be estimated for {result.topology}"
    return (
        f"nothing was compiled for {result.topology} within {format_seconds(result.time_budget_s)}"
    )


def _facts(result: SearchOutcomes) -> Iterable[tuple[str, str]]:
    best = result.best
    if best and best.plan:
        if best.plan.time:
            mfu = "" if best.plan.mfu is None else f", MFU {best.plan.mfu:.1%}"
            yield STEP_TIME, f"{format_step(best.plan.time)}{mfu}"
        if best.plan.tokens_per_s is not None:
            yield SPEED, f"{format_count(best.plan.tokens_per_s)} tokens/s"
        yield MEMORY, _memory(best)
    tried = len(result.outcomes) - len(result.of(NOT_REACHED))
    of = f" of {len(result.outcomes)}" if tried < len(result.outcomes) else ""
    yield "tried", f"{plural(tried, 'candidate')}{of} in {format_seconds(result.seconds)}"


def _table_of_fitting(outcomes: tuple[Outcome, ...]) -> TextTable:
    columns = (
        Column("layout", is_short=True),
        Column("remat", is_short=True),
        Column("microbatches", is_number=True, only_wide=_have_equal_microbatches(outcomes)),
        Column("step", is_number=True),
        Column("low to high", is_number=True, only_wide=True),
        Column("tokens/s", is_number=True),
        Column("MFU", is_number=True),
        Column("memory", is_number=True),
        Column("ICI", is_number=True, only_wide=True),
        Column("DCN", is_number=True, only_wide=True),
    )
    title = "Fits, the fastest first" if outcomes[0].step_s else "Fits, the smallest first"
    rows = tuple(_row(x) for x in outcomes)
    # A column without a value is omitted, such as the times of devices without rates.
    used = [i for i in range(len(columns)) if any(row[i] not in ("", "-") for row in rows)]
    return TextTable(
        tuple(columns[i] for i in used), tuple(tuple(row[i] for i in used) for row in rows), title
    )


def _table_of_estimates(outcomes: tuple[Outcome, ...]) -> TextTable:
    columns = (
        Column("layout", is_short=True),
        Column("remat", is_short=True),
        Column("microbatches", is_number=True, only_wide=_have_equal_microbatches(outcomes)),
        Column("step", is_number=True),
        Column("memory", is_number=True),
    )
    num = len(outcomes)
    title = f"Estimated and not compiled, the most promising {min(num, _NUM_ESTIMATED)} of {num}"
    return TextTable(columns, tuple(map(_row_of_estimate, outcomes[:_NUM_ESTIMATED])), title)


def _have_equal_microbatches(outcomes: tuple[Outcome, ...]) -> bool:
    return len({x.candidate.microbatches for x in outcomes}) == 1


def _row_of_estimate(outcome: Outcome) -> tuple[str, ...]:
    estimate = outcome.estimate
    assert estimate is not None
    share = format_share(estimate.peak_bytes / estimate.capacity_bytes)
    return (
        outcome.candidate.geometry,
        outcome.candidate.remat,
        str(outcome.candidate.microbatches),
        f"~{format_seconds(estimate.step_s)}",
        f"~{format_bytes(round(estimate.peak_bytes))} ({share})",
    )


def _row(outcome: Outcome) -> tuple[str, ...]:
    plan = outcome.plan
    assert plan is not None
    return (
        outcome.candidate.geometry,
        outcome.candidate.remat,
        str(outcome.candidate.microbatches),
        format_seconds(plan.time.step_s) if plan.time else "-",
        _format_ends(plan.time),
        "-" if plan.tokens_per_s is None else format_count(plan.tokens_per_s),
        "-" if plan.mfu is None else f"{plan.mfu:.1%}",
        _memory(outcome),
        format_bytes(plan.ici_bytes) if plan.ici_bytes else "-",
        format_bytes(plan.dcn_bytes) if plan.dcn_bytes else "-",
    )


def _format_ends(spent: TimeEstimate | None) -> str:
    if spent is None or spent.low_s is None or spent.high_s is None:
        return "-"
    return f"{format_seconds(spent.low_s)} to {format_seconds(spent.high_s)}"


def _list_close_to_best(fitting: tuple[Outcome, ...]) -> tuple[str, ...]:
    """Returns a sentence on the candidates that may be as fast as the best."""
    if not fitting or (best := _error_bar(fitting[0], fitting)) is None:
        return ()
    low, step, high = best
    close = []
    for outcome in fitting[1:]:
        other = _error_bar(outcome, fitting)
        if other and low <= other[1] <= high and other[0] <= step <= other[2]:
            close.append(outcome.candidate.name)
    if not close:
        return ()
    return (
        f"The estimate of the best is within the error bar of these, and theirs within its bar: "
        f"{'; '.join(close)}. The slice may rank them differently.",
    )


def _error_bar(outcome: Outcome, fitting: tuple[Outcome, ...]) -> tuple[float, float, float] | None:
    """Returns low end, estimate and high end of a step, per token if candidates compare by it."""
    plan = outcome.plan
    if plan is None or plan.time is None or plan.time.low_s is None or plan.time.high_s is None:
        return None
    tokens = (plan.tokens_per_step or 1) if counts_tokens(fitting) else 1
    return plan.time.low_s / tokens, plan.time.step_s / tokens, plan.time.high_s / tokens


def _group_by_reason(outcomes: list[Outcome]) -> Iterable[str]:
    for reason in dict.fromkeys(x.reason for x in outcomes):
        yield f"{reason}: {'; '.join(x.candidate.name for x in outcomes if x.reason == reason)}"


def _memory(outcome: Outcome) -> str:
    report = outcome.plan.memory if outcome.plan else None
    if report is None:
        return "-"
    if not report.capacity_bytes:
        return format_bytes(report.reserved_bytes)
    share = format_share(report.reserved_bytes / report.capacity_bytes)
    return f"{format_bytes(report.reserved_bytes)} ({share})"


def _describe_too_large(outcome: Outcome, fitting: tuple[Outcome, ...]) -> str:
    """Returns the excess, the largest buffers, and the remedy."""
    refusal = outcome.plan.refusal if outcome.plan else None
    text = f"{outcome.candidate.name}: "
    if refusal and refusal.needed_bytes:
        text += (
            f"needs {format_bytes(refusal.needed_bytes)} of "
            f"{format_bytes(refusal.available_bytes)}, "
            f"{format_bytes(refusal.over_bytes)} too much."
        )
    else:
        text += "too large; the compiler does not say by how much."
    largest = refusal.largest[:_NUM_LARGEST] if refusal else ()
    if largest:
        buffers = ", ".join(
            " ".join(
                filter(
                    None,
                    (
                        format_bytes(buffer.num_bytes),
                        format_op(buffer.op_name) or buffer.name,
                        f"({format_source(buffer.source)})" if buffer.source else "",
                    ),
                )
            )
            for buffer in largest
        )
        text += f" Biggest: {buffers}."
    if outcome.remedy is None:
        return f"{text} Nothing that was tried makes it fit."
    cost = _cost(outcome.remedy.candidate, fitting)
    return f"{text} It fits with {' and '.join(outcome.remedy.changes)}{cost}."


def _cost(name: str, fitting: tuple[Outcome, ...]) -> str:
    """Returns the cost of a candidate, such as " (2.31 s per step, 4% slower than the best)"."""
    best = fitting[0]
    outcome = next(x for x in fitting if x.candidate.name == name)
    if not outcome.step_s or not best.step_s:
        return ""
    times, per = [outcome.step_s, best.step_s], ""
    if counts_tokens(fitting):
        tokens = [x.plan.tokens_per_step or 1 for x in (outcome, best) if x.plan]
        times = [time / number for time, number in zip(times, tokens, strict=True)]
        per = " per token" if tokens[0] != tokens[1] else ""
    slower = format_share(times[0] / times[1] - 1)
    comparison = f"{slower} slower{per} than the best"
    if outcome is best:
        comparison = "the best"
    elif times[0] <= times[1]:
        comparison = f"as fast{per} as the best"
    return f" ({format_seconds(outcome.step_s)} per step, {comparison})"
