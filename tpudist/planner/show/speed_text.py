"""The sections of a plan on time and communication."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tpudist.display.text_tables import Column, TextTable
from tpudist.planner.show.formats import (
    device_noun,
    format_bytes,
    format_count,
    format_flops,
    format_op,
    format_range,
    format_seconds,
    format_share,
)
from tpudist.planner.show.report_parts import (
    BLUE,
    GREY,
    NETWORK_COLORS,
    NUM_ROWS,
    PURPLE,
    TEAL,
    Bars,
    Lines,
    Part,
)
from tpudist.xla.estimate.collective_traffic import CollectiveUse
from tpudist.xla.estimate.guesses import Guess
from tpudist.xla.estimate.step_time import TimeEstimate

if TYPE_CHECKING:
    from tpudist.planner.plan_figures import PlanFigures


_MIN_SHARE = 1e-3  # a shorter part would be invisible in the bar
_NUM_CAUSES = 4
_MIN_GUESS = 5e-3  # of a step: less is far below the error bar


def format_steps(spent: TimeEstimate, num_steps: int) -> str:
    """Returns the time of several steps with its error bar: "4.20 h (3.60 to 4.90)"."""
    seconds = num_steps * spent.step_s
    if spent.low_s is None or spent.high_s is None:  # a plan of an older version
        return f"{format_seconds(seconds)} (an estimate)"
    return format_range(seconds, num_steps * spent.low_s, num_steps * spent.high_s)


def format_step(spent: TimeEstimate) -> str:
    """Returns the time of a step, such as "4.20 s (3.60 to 4.90), 7% of it guessed"."""
    text = format_steps(spent, 1)
    if spent.unknown_trip_counts:  # the step may take many times as long
        text += ", loops of unknown length counted once"
    if spent.step_s and spent.guessed_s > _MIN_GUESS * spent.step_s:
        text += f", {format_share(spent.guessed_s / spent.step_s)} of it guessed"
    return text


def time_sections(plan: PlanFigures) -> Iterable[Bars | TextTable | Lines]:
    """Yields the parts of the time of a step and its longest operations, if they are estimated."""
    spent = plan.time
    if spent is None:
        return
    parts = [
        ("compute", spent.compute_s, BLUE),
        ("custom kernels", spent.kernels_s, PURPLE),
        ("waiting for ICI", spent.exposed_ici_s, NETWORK_COLORS["ici"]),
        ("waiting for DCN", spent.exposed_dcn_s, NETWORK_COLORS["dcn"]),
        ("waiting for the host", spent.exposed_host_s, NETWORK_COLORS["host"]),
        ("waiting for the slowest slice", spent.slow_slices_s, TEAL),
    ]
    # The rest of the step. `step_s` is at least the time of all bytes through HBM, so a step bound
    # by memory is longer than the sum of its operations.
    parts.append(("waiting for HBM", spent.step_s - sum(seconds for _, seconds, _ in parts), GREY))
    title, notes = "Time of a step: an estimate", tuple(_notes_on_time(plan, spent))
    yield time_bars(title, spent, parts, notes)
    # `top` has one entry per kind and source line.
    longest = [op for op in spent.top if op.seconds > _MIN_SHARE * spent.step_s]
    if longest:
        columns = (
            Column("time", is_number=True),
            Column("share", is_number=True),
            Column("kind"),
            Column("operation"),
            Column("line", is_source=True),
        )
        rows = tuple(
            (
                format_seconds(op.seconds),
                format_share(op.seconds / (spent.step_s or 1.0)),
                op.kind,
                format_op(op.op_name) or op.name,
                op.source or "",
            )
            for op in longest[:NUM_ROWS]
        )
        yield TextTable(columns, rows, "What takes longest")
    guessed = [guess for guess in spent.guessed if guess.seconds > _MIN_SHARE * spent.step_s]
    if guessed:
        yield Lines("Guessed", tuple(map(_format_guess, guessed[:NUM_ROWS])))


def time_bars(
    title: str,
    spent: TimeEstimate,
    parts: Iterable[tuple[str, float, str]],
    notes: tuple[str, ...] = (),
) -> Bars:
    """Returns the bar of a step; `parts` has the name, the seconds and the color of each part."""
    shown = tuple(
        Part(name, seconds, format_seconds(seconds), format_share(seconds / spent.step_s), color)
        for name, seconds, color in parts
        if seconds > _MIN_SHARE * spent.step_s
    )
    ends = None
    if spent.low_s is not None and spent.high_s is not None:
        ends = (spent.low_s, spent.high_s)
    return Bars(title, spent.step_s, shown, notes, error_bar=ends)


def _format_guess(guess: Guess) -> str:
    place = f" ({guess.source.rpartition('/')[2]})" if guess.source else ""
    if not guess.branches:
        return f"{guess.what}{place}: {format_seconds(guess.seconds)}"
    # Only a run shows which branch it takes. So one has the weight 1, and the others 0.
    slowest = guess.branches.index(max(guess.branches))
    counted = slowest if guess.counted is None else guess.counted
    branches = ", ".join(
        f"branch {number} takes {format_seconds(seconds)} (weight {int(number == counted)})"
        for number, seconds in enumerate(guess.branches)
    )
    return f"{guess.what}{place}: {branches}"


def _notes_on_time(plan: PlanFigures, spent: TimeEstimate) -> Iterable[str]:
    for network, whole, exposed in (
        ("ICI", spent.ici_s, spent.exposed_ici_s),
        ("DCN", spent.dcn_s, spent.exposed_dcn_s),
        ("The way to the host's memory", spent.host_s, spent.exposed_host_s),
    ):
        if whole > 0:
            hidden = whole - exposed
            if hidden < _MIN_SHARE * whole:  # the rounding error of a difference
                hidden = 0.0
            yield (
                f"{network} is busy for {format_seconds(whole)}; computation hides "
                f"{format_seconds(hidden)} of it."
            )
    if spent.causes:
        causes = ", ".join(
            f"{cause.name} -{format_seconds(cause.low_s)} +{format_seconds(cause.high_s)}"
            for cause in spent.causes[:_NUM_CAUSES]
        )
        yield f"The error bar is the root of the sum of the squares of its causes: {causes}."
    bounds = []
    if spent.peak_bound_s:
        at_peak = format_seconds(spent.peak_bound_s)
        bounds.append(f"{at_peak} for {format_flops(spent.flops)} at the chip's peak")
    if spent.memory_bound_s:
        bounds.append(
            f"{format_seconds(spent.memory_bound_s)} for "
            f"{format_bytes(spent.hbm_bytes)} through HBM"
        )
    if bounds:
        yield f"Lower bounds: {'; '.join(bounds)}."


def traffic_sections(plan: PlanFigures) -> Iterable[TextTable]:
    """Yields the collectives of a step, if there are any; the longest waits first."""
    if not plan.collectives:
        return
    networks = {use.network for use in plan.collectives}
    columns = (
        Column("what", is_short=True),
        Column("along"),
        Column("over", only_wide=len(networks) == 1),
        Column("times", is_number=True),
        Column("sends", is_number=True),
        Column("takes", is_number=True, only_wide=True),
        Column("waited", is_number=True),
        Column("async", only_wide=True),
        Column("line", is_source=True),
    )
    merged = merge_uses(plan.collectives)
    rows = tuple(
        (
            use.kind,
            " ".join(use.axes) or "some devices",
            use.network if use.network == "host" else use.network.upper(),
            format_count(use.count),
            format_bytes(use.sent_bytes),
            format_seconds(use.seconds) if use.seconds else "",
            format_seconds(use.exposed_s) if use.seconds else "",
            "yes" if use.is_async else "no",
            use.source or "",
        )
        for use in merged[:NUM_ROWS]
    )
    rest = merged[NUM_ROWS:]
    notes = ()
    if rest:
        sent = format_bytes(sum(use.sent_bytes for use in rest))
        waited = format_seconds(sum(use.exposed_s for use in rest))
        notes = (f"And {len(rest)} more: {sent} sent, {waited} waited.",)
    sums = [f"{format_bytes(plan.ici_bytes)} over ICI"] if plan.ici_bytes else []
    sums += [f"{format_bytes(plan.dcn_bytes)} over DCN"] if plan.dcn_bytes else []
    chip, sent = device_noun(plan.num_chips, plan.num_devices), " and ".join(sums) or "nothing"
    title = f"Communication: a {chip} sends {sent} per step"
    yield TextTable(columns, rows, title, notes)


def merge_uses(uses: Iterable[CollectiveUse]) -> list[CollectiveUse]:
    """Merges uses that differ only in size and place in the program; the longest waits first."""
    groups: dict[tuple, list[CollectiveUse]] = {}
    for use in uses:
        # Without sizes: the layers of a model often differ only in these.
        key = (use.kind, use.axes, use.network, use.is_async, use.source)
        groups.setdefault(key, []).append(use)
    merged = [
        dataclasses.replace(
            group[0],
            num_bytes=sum(use.num_bytes for use in group),
            count=sum(use.count for use in group),
            sent_bytes=sum(use.sent_bytes for use in group),
            seconds=sum(use.seconds for use in group),
            exposed_s=sum(use.exposed_s for use in group),
        )
        for group in groups.values()
    ]
    return sorted(merged, key=lambda use: (-use.exposed_s, -use.seconds, -use.sent_bytes))
