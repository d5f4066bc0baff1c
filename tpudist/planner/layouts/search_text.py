"""What a search found, in words: a terminal and a notebook show it as they show a plan."""

from __future__ import annotations

from collections.abc import Iterable

from tpudist.display.text_tables import Column, TextTable, format_source
from tpudist.planner.layouts.search_outcomes import Outcome, SearchOutcomes
from tpudist.planner.search_status import FAILED, FITS, NOT_REACHED, TOO_LARGE
from tpudist.planner.show.parts import Lines, Report
from tpudist.planner.show.words import (
    format_bytes,
    format_count,
    format_op,
    format_seconds,
    format_share,
    plural,
)

# Of the buffers of one that is too large.
_NUM_LARGEST = 2


def describe_search(result: SearchOutcomes) -> Report:
    """A search in words."""
    fitting, too_large = result.of(FITS), result.of(TOO_LARGE)
    num = len(result.outcomes)
    sections: list[TextTable | Lines] = []
    if fitting:
        sections.append(_table_of_fitting(fitting))
    if too_large:
        title = f"Does not fit ({len(too_large)} of {num})"
        sections.append(Lines(title, tuple(_describe_too_large(one, fitting) for one in too_large)))
    if failed := result.of(FAILED):
        lines = tuple(f"{one.candidate.name}: {one.reason}" for one in failed)
        sections.append(Lines(f"Failed ({len(failed)} of {num})", lines))
    if late := result.of(NOT_REACHED):
        title = f"Not reached within {format_seconds(result.time_budget_s)} ({len(late)} of {num})"
        sections.append(Lines(title, tuple(_group_by_reason(late))))
    best = f"best on {result.topology}: {result.best.candidate.name}" if result.best else ""
    return Report(
        best or _title_without_result(result), bool(fitting), tuple(_facts(result)), tuple(sections)
    )


def _title_without_result(result: SearchOutcomes) -> str:
    """The title of a search that found nothing."""
    if result.of(TOO_LARGE):
        return f"no candidate fits {result.topology}"
    if result.of(FAILED):
        return f"all that was tried for {result.topology} failed"
    return (
        f"nothing was compiled for {result.topology} within {format_seconds(result.time_budget_s)}"
    )


def _facts(result: SearchOutcomes) -> Iterable[tuple[str, str]]:
    best = result.best
    if best and best.plan:
        if best.plan.time:
            mfu = "" if best.plan.mfu is None else f", MFU {best.plan.mfu:.1%}"
            yield "step time", f"{format_seconds(best.plan.time.step_s)}{mfu} (an estimate)"
        if best.plan.tokens_per_s is not None:
            yield "speed", f"{format_count(best.plan.tokens_per_s)} tokens/s"
        yield "memory", _memory(best)
    tried = len(result.outcomes) - len(result.of(NOT_REACHED))
    of = f" of {len(result.outcomes)}" if tried < len(result.outcomes) else ""
    yield "tried", f"{plural(tried, 'candidate')}{of} in {format_seconds(result.seconds)}"


def _table_of_fitting(outcomes: tuple[Outcome, ...]) -> TextTable:
    columns = (
        Column("layout", is_short=True),
        Column("remat", is_short=True),
        Column("microbatches", is_number=True, only_wide=True),
        Column("step", is_number=True),
        Column("tokens/s", is_number=True),
        Column("MFU", is_number=True),
        Column("memory", is_number=True),
        Column("ICI", is_number=True, only_wide=True),
        Column("DCN", is_number=True, only_wide=True),
        Column("", only_wide=True),
    )
    title = "Fits, the fastest first" if outcomes[0].step_s else "Fits, the smallest first"
    rows = tuple(_row(one) for one in outcomes)
    used = [i for i in range(len(columns)) if any(row[i] not in ("", "-") for row in rows)]
    return TextTable(
        tuple(columns[i] for i in used), tuple(tuple(row[i] for i in used) for row in rows), title
    )


def _row(one: Outcome) -> tuple[str, ...]:
    plan = one.plan
    assert plan is not None
    return (
        one.candidate.geometry,
        one.candidate.remat,
        str(one.candidate.microbatches),
        format_seconds(plan.time.step_s) if plan.time else "-",
        "-" if plan.tokens_per_s is None else format_count(plan.tokens_per_s),
        "-" if plan.mfu is None else f"{plan.mfu:.1%}",
        _memory(one),
        format_bytes(plan.ici_bytes) if plan.ici_bytes else "-",
        format_bytes(plan.dcn_bytes) if plan.dcn_bytes else "-",
        f"the same program as {one.same_as}" if one.same_as else "",
    )


def _group_by_reason(outcomes: tuple[Outcome, ...]) -> Iterable[str]:
    """One sentence for each reason."""
    for reason in dict.fromkeys(one.reason for one in outcomes):
        yield f"{reason}: {'; '.join(x.candidate.name for x in outcomes if x.reason == reason)}"


def _memory(one: Outcome) -> str:
    report = one.plan.memory if one.plan else None
    if report is None:
        return "-"
    if not report.capacity_bytes:
        return format_bytes(report.peak_bytes)
    share = format_share(report.peak_bytes / report.capacity_bytes)
    return f"{format_bytes(report.peak_bytes)} ({share})"


def _describe_too_large(one: Outcome, fitting: tuple[Outcome, ...]) -> str:
    """By how much, what is biggest, and what would make it fit."""
    refusal = one.plan.refusal if one.plan else None
    said = f"{one.candidate.name}: "
    if refusal and refusal.needed_bytes:
        said += (
            f"needs {format_bytes(refusal.needed_bytes)} of "
            f"{format_bytes(refusal.available_bytes)}, "
            f"{format_bytes(refusal.over_bytes)} too much."
        )
    else:
        said += "too large; the compiler does not say by how much."
    largest = refusal.largest[:_NUM_LARGEST] if refusal else ()
    if largest:
        told = ", ".join(
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
        said += f" Biggest: {told}."
    if one.remedy is None:
        return f"{said} Nothing that was tried makes it fit."
    cost = _cost(one.remedy.candidate, fitting)
    return f"{said} It fits with {' and '.join(one.remedy.changes)}{cost}."


def _cost(name: str, fitting: tuple[Outcome, ...]) -> str:
    """What one costs beside the best, as " (2.31 s per step, 4% slower than the best)".

    Beside steps of other numbers of tokens it is slower per token, as they are ranked.
    """
    best = fitting[0]
    found = next(one for one in fitting if one.candidate.name == name)
    if not found.step_s or not best.step_s:
        return ""
    times, per = [found.step_s, best.step_s], ""
    if all(one.plan and one.plan.tokens_per_s for one in fitting):  # as `ranked` has it
        tokens = [one.plan.tokens_per_step or 1 for one in (found, best) if one.plan]
        times = [time / number for time, number in zip(times, tokens, strict=True)]
        per = " per token" if tokens[0] != tokens[1] else ""
    slower = format_share(times[0] / times[1] - 1)
    beside = f"{slower} slower{per} than the best"
    if found is best:
        beside = "the best"
    elif times[0] <= times[1]:
        beside = f"as fast{per} as the best"
    return f" ({format_seconds(found.step_s)} per step, {beside})"
