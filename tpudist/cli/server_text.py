"""The report of a server: the times of its steps, what bounds them, and its memory."""

from __future__ import annotations

from collections.abc import Iterable

from tpudist.planner.plan_record import Plan
from tpudist.planner.server_plan import ServerPlan
from tpudist.planner.show.formats import (
    device_noun,
    format_axes,
    format_bytes,
    format_count,
    format_flops,
    plural,
)
from tpudist.planner.show.memory_text import memory_sections
from tpudist.planner.show.report_parts import (
    BLUE,
    GREEN,
    GREY,
    MEMORY,
    NETWORK_COLORS,
    PURPLE,
    SPEED,
    Lines,
    Report,
)
from tpudist.planner.show.speed_text import format_step, time_bars, traffic_sections
from tpudist.xla.estimate.memory import CACHE
from tpudist.xla.estimate.step_time import TimeEstimate

_Amounts = list[tuple[str, float, str]]  # name, seconds and color of each part of a time


def describe_server(server: ServerPlan) -> Report:
    """Returns the report of a server."""
    plan = server.decode
    sections: list = []
    if time := plan.time:
        sections.append(time_bars("Time per token", time, _parts_of_decode(plan, time)))
    if time := server.prefill.time:
        sections.append(time_bars("Time to the first token", time, _parts_of_prefill(time)))
    sections += memory_sections(plan)
    sections += traffic_sections(plan)
    notes = [*dict.fromkeys((*plan.notes, *server.prefill.notes))]
    if plan.fits and not server.fits:
        notes.insert(0, "A prefill step does not fit next to the cache of all sequences.")
    if notes:
        sections.append(Lines("Notes", tuple(notes)))
    verdict = "fits" if server.fits else "does not fit"
    facts = tuple(_facts(server, plan))
    return Report(f"The server {verdict} {plan.topology}", server.fits, facts, tuple(sections))


def _facts(server: ServerPlan, plan: Plan) -> Iterable[tuple[str, str]]:
    chip = device_noun(plan.num_chips, plan.num_devices)
    if report := plan.memory:
        of = f" of {format_bytes(report.capacity_bytes)}" if report.capacity_bytes else ""
        yield MEMORY, f"{format_bytes(report.reserved_bytes)}{of} per {chip} while decoding"
    if time := server.prefill.time:
        prompts = f"{plural(server.num_prompts, 'prompt')} of {server.prompt_length:,} tokens"
        yield "first token", f"{format_step(time)}, for {prompts}"
    if time := plan.time:
        *parts, _ = _parts_of_decode(plan, time)  # the last one has no single cause
        longest = max(parts, key=lambda part: part[1])[0]
        yield "next tokens", f"{format_step(time)} each, bound by {longest}"
    if (speed := server.tokens_per_s) is not None:
        per_chip = format_count(speed / plan.num_chips)
        yield SPEED, f"{format_count(speed)} new tokens/s, {per_chip} per chip, with prefill steps"
    per_chip = format_count(server.max_sequences / plan.num_chips)
    yield (
        "sequences",
        f"{server.num_sequences:,} of {server.prompt_length:,} + {server.output_length:,} tokens; "
        f"{server.max_sequences:,} fit, {per_chip} per chip",
    )
    yield "slice", f"{plan.topology}: {plural(plan.num_chips, 'chip')}"
    yield "mesh", format_axes(plan.mesh)


def _parts_of_decode(plan: Plan, time: TimeEstimate) -> _Amounts:
    """Returns the parts of a decode step: each byte of weights and cache is read once."""
    cache = plan.memory.categories.get(CACHE, 0) if plan.memory else 0
    waits = _waits(time)
    busy_s = time.step_s - sum(seconds for _, seconds, _ in waits)
    reads_s = min(time.memory_bound_s, busy_s)
    cache_s = reads_s * min(1.0, cache / (time.hbm_bytes or 1.0))
    other = format_bytes(max(0, int(time.hbm_bytes) - cache))
    return [
        (f"reading weights, and other values ({other})", reads_s - cache_s, BLUE),
        (f"reading the cache ({format_bytes(cache)})", cache_s, GREEN),
        *waits,
        ("computing longer than the reads take", busy_s - reads_s, GREY),
    ]


def _parts_of_prefill(time: TimeEstimate) -> _Amounts:
    waits = _waits(time)
    busy_s = time.step_s - sum(seconds for _, seconds, _ in waits)
    peak_s = min(time.peak_bound_s, busy_s)
    return [
        (f"{format_flops(time.flops)} at the chip's peak", peak_s, PURPLE),
        *waits,
        ("computing slower than the peak", busy_s - peak_s, GREY),
    ]


def _waits(time: TimeEstimate) -> _Amounts:
    return [
        ("waiting for ICI", time.exposed_ici_s, NETWORK_COLORS["ici"]),
        ("waiting for DCN", time.exposed_dcn_s + time.slow_slices_s, NETWORK_COLORS["dcn"]),
    ]
