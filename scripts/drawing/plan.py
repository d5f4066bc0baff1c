"""The plan of a large model: memory, time and communication, as `plan.chart` draws them."""

import json
from typing import NamedTuple

from drawing import stored
from drawing.canvas import Canvas, width_of
from drawing.palettes import Palette
from tpudist.display.text_tables import format_source
from tpudist.planner import Plan
from tpudist.planner.show.formats import format_seconds
from tpudist.planner.show.plan_text import describe_plan
from tpudist.planner.show.report_parts import Bars
from tpudist.planner.show.speed_text import merge_uses

HUES = ("blue", "teal", "amber", "purple", "red")
COLLECTIVES = 4


class Facts(NamedTuple):
    """Facts of the picture, in the words of the plan."""

    title: str
    told: list[str]
    bars: list[Bars]
    collectives: list[tuple[str, float, float, str]]


def facts() -> Facts:
    """Reads the stored plan."""
    plan = Plan.from_json(json.dumps(stored.read("plan")))
    said = describe_plan(plan)
    told = [value for name, value in said.facts if name in ("memory", "step time", "speed")]
    uses = merge_uses(plan.collectives)[:COLLECTIVES]
    rows = [
        (f"{x.kind} over {' '.join(x.axes)}", x.seconds, x.exposed_s, format_source(x.source))
        for x in uses
    ]
    return Facts(said.title, told, [x for x in said.sections if isinstance(x, Bars)], rows)


def draw(facts: Facts, palette: Palette) -> Canvas:
    """A bar of memory and one of time, each with a legend; a bar for each collective."""
    canvas = Canvas(palette, facts.title, 760, 486)
    canvas.text(
        10, 26, facts.title.replace("train_step", "Llama-3.1-8B"), bold=True, size=18, color="teal"
    )
    for i, line in enumerate(facts.told):
        canvas.text(10, 50 + 20 * i, line, color="muted")
    y = 122
    for bars, hues in zip(facts.bars, (HUES, HUES[3:] + HUES), strict=True):
        y = _draw_bars(canvas, y, bars, hues)
    hidden = any(exposed < 0.99 * seconds for _, seconds, exposed, _ in facts.collectives)
    pale = " (pale: hidden behind computation)" if hidden else ""
    canvas.text(10, y, f"Largest communication per step{pale}", bold=True)
    most = max(seconds for _, seconds, _, _ in facts.collectives)
    for i, (name, seconds, exposed, line) in enumerate(facts.collectives):
        top = y + 12 + 26 * i
        canvas.text(170, top + 15, name, anchor="end", color="muted", size=13)
        canvas.rect(180, top, 330 * seconds / most, 18, "pale", "muted", radius=2)
        canvas.rect(180, top, 330 * exposed / most, 18, "amber-fill", "amber", radius=2)
        told = f"{format_seconds(seconds)}   {line}"
        canvas.text(190 + 330 * seconds / most, top + 15, told, color="muted", size=13)
    return canvas


def _draw_bars(canvas: Canvas, y: float, bars: Bars, hues: tuple[str, ...]) -> float:
    """One bar and its legend; returns where the next one begins."""
    canvas.text(10, y, bars.title, bold=True)
    _, high = bars.error_bar or (0.0, 0.0)
    scale = 740 / max(bars.whole, high)
    canvas.rect(10, y + 10, scale * bars.whole, 28, "none", radius=2)
    x, entries = 10.0, []
    parts = [part for part in bars.parts if part.amount / bars.whole >= 0.01]
    for part, hue in zip(parts, hues, strict=False):
        width = scale * part.amount
        canvas.rect(x, y + 10, width, 28, f"{hue}-fill", hue, radius=2)
        entries.append((f"{part.name} {part.text}", f"{hue}-fill", hue))
        x += width
    if bars.error_bar:
        low_x, high_x = (10 + scale * end for end in bars.error_bar)
        for begin, end in (
            ((low_x, y + 24), (high_x, y + 24)),
            ((low_x, y + 18), (low_x, y + 30)),
            ((high_x, y + 18), (high_x, y + 30)),
        ):
            canvas.line(begin, end, color="ink")
    if bars.free:
        entries.append((f"{bars.free.name} {bars.free.text}", "none", "muted"))
    left, top = 10.0, y + 52
    for text, fill, stroke in entries:
        wide = 22 + width_of(text) + 14
        if left + wide > 760:
            left, top = 10.0, top + 22
        canvas.rect(left, top, 13, 13, fill, stroke, radius=2)
        canvas.text(left + 20, top + 12, text)
        left += wide
    return top + 48
