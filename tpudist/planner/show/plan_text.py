"""The report of a plan: its text, section by section.

This module decides on order, merging and omissions. `terminal`, `html` and `chart` only lay the
report out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tpudist.planner.show.formats import (
    device_noun,
    format_axes,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
    plural,
)
from tpudist.planner.show.memory_text import list_replicated, memory_sections
from tpudist.planner.show.report_parts import MEMORY, SPEED, STEP_TIME, Lines, Report
from tpudist.planner.show.speed_text import (
    format_step,
    format_steps,
    time_sections,
    traffic_sections,
)
from tpudist.xla.estimate.step_time import TimeEstimate
from tpudist.xla.mesh import REPLICA_AXIS

if TYPE_CHECKING:
    from tpudist.planner.plan_figures import PlanFigures


def describe_plan(
    plan: PlanFigures, num_steps: int | None = None, price: float | None = None
) -> Report:
    """Returns the report of a plan, for a run of `num_steps` and a price per chip-hour."""
    # Memory first: if the program does not fit, it is the only figure.
    sections = [
        *memory_sections(plan),
        *time_sections(plan),
        *traffic_sections(plan),
        *list_replicated(plan),
    ]
    if plan.notes:
        sections.append(Lines("Notes", plan.notes))
    verdict = "fits" if plan.fits else "does not fit"
    facts = tuple(_facts(plan, num_steps, price))
    return Report(f"{plan.name} {verdict} {plan.topology}", plan.fits, facts, tuple(sections))


def _facts(
    plan: PlanFigures, num_steps: int | None, price: float | None
) -> Iterable[tuple[str, str]]:
    chip = device_noun(plan.num_chips, plan.num_devices)
    if plan.refusal and not plan.refusal.needed_bytes:
        yield MEMORY, "too little: the compiler does not say by how much"
    elif refusal := plan.refusal:
        yield (
            MEMORY,
            f"needs {format_bytes(refusal.needed_bytes)} per {chip}, which has "
            f"{format_bytes(refusal.available_bytes)}: {format_bytes(refusal.over_bytes)} too much",
        )
    elif report := plan.memory:
        of = ""
        if capacity := report.capacity_bytes:
            of = f" of {format_bytes(capacity)} ({format_share(report.reserved_bytes / capacity)})"
        yield MEMORY, f"{format_bytes(report.reserved_bytes)}{of} per {chip}"
    if plan.time:
        mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
        yield STEP_TIME, f"{format_step(plan.time)}{mfu}"
        if plan.tokens_per_s is not None:
            per_chip = plan.tokens_per_s / plan.num_chips
            yield (
                SPEED,
                f"{format_count(plan.tokens_per_s)} tokens/s, {format_count(per_chip)} per chip",
            )
    devices = "" if chip == "chip" else f", {plural(plan.num_devices, 'device')}"
    replicas = f" ({plural(plan.num_replicas, 'replica')})" if REPLICA_AXIS in plan.mesh else ""
    yield "slice", f"{plan.topology}: {plural(plan.num_chips, 'chip')}{devices}"
    yield "mesh", f"{format_axes(plan.mesh)}{replicas}"
    if plan.fits and plan.time and num_steps:
        yield f"{num_steps:,} steps", _format_run(plan, plan.time, num_steps, price)
    if plan.compile_s:
        libtpu = plan.versions.get("libtpu")
        compiler = f" with libtpu {libtpu}" if libtpu and plan.chip else ""
        yield "compiled", f"in {format_seconds(plan.trace_s + plan.compile_s)}{compiler}"


def _format_run(
    plan: PlanFigures, estimate: TimeEstimate, num_steps: int, price: float | None
) -> str:
    hours = plan.chip_hours(num_steps) or 0.0
    cost = "" if price is None else f", {hours * price:,.2f} at {price:g} per chip-hour"
    time = format_steps(estimate, num_steps)
    return f"{time}, {format_count(hours)} chip-hours{cost}"
