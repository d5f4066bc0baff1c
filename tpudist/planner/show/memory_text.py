"""The sections of a plan on memory, with advice if there is too little."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tpudist.display.text_tables import Column, TextTable
from tpudist.planner.show.advice import suggest_changes
from tpudist.planner.show.formats import (
    device_noun,
    format_bytes,
    format_op,
    format_shape,
    format_share,
    list_first,
)
from tpudist.planner.show.report_parts import (
    BLUE,
    GREEN,
    GREY,
    NUM_ROWS,
    ORANGE,
    PURPLE,
    RED,
    SPARE,
    TEAL,
    YELLOW,
    Bars,
    Lines,
    Part,
)
from tpudist.xla.estimate.refusal import Refusal
from tpudist.xla.hlo import shapes
from tpudist.xla.hlo.buffers import Buffer, merge_lines

if TYPE_CHECKING:
    from tpudist.planner.plan_figures import PlanFigures

_MAX_NAMES = 6
_MIN_SHARE = 1e-3  # smaller buffers are omitted
_MEMORY_COLORS = {
    "parameters": BLUE,
    "optimizer state": PURPLE,
    "gradients and activations": ORANGE,
    "cache": GREEN,
    "batch": TEAL,
    "other arguments": YELLOW,
    "outputs": GREEN,
}


def memory_sections(plan: PlanFigures) -> Iterable[Bars | TextTable | Lines]:
    """Yields the memory of a device by category, and its largest values; or why it does not fit."""
    chip = device_noun(plan.num_chips, plan.num_devices)
    if plan.refusal:
        yield from _explain_refusal(plan, plan.refusal)
    elif report := plan.memory:
        names = [name for name, amount in report.categories.items() if amount > 0]
        colors = _colors(names, _MEMORY_COLORS)
        parts = [
            _part(name, report.categories[name], report.capacity_bytes, color)
            for name, color in colors.items()
        ]
        lines = []
        if report.donated_bytes:
            lines.append(
                f"{format_bytes(report.donated_bytes)} are overwritten in place (donated)."
            )
        if padding := sum(report.padding_bytes.values()):
            most = max(report.padding_bytes, key=lambda name: report.padding_bytes[name])
            lines.append(f"{format_bytes(padding)} are padding, most of it of {most}.")
        if report.host_bytes:
            lines.append(f"{format_bytes(report.host_bytes)} more are in the host's memory.")
        if report.not_donated:
            lines.append(f"Not overwritten in place: {list_first(report.not_donated, _MAX_NAMES)}.")
        if (gaps := report.allocated_bytes - report.peak_bytes) > 0:
            parts.append(_part("gaps between values", gaps, report.capacity_bytes, RED))
        if report.program_bytes:
            parts.append(_part("the program", report.program_bytes, report.capacity_bytes, GREY))
        if report.program_bytes is None:
            lines.append("The size of the machine code is unknown (--complete, complete=True).")
        free = None
        if left := max(0, report.free_bytes or 0):
            free = _part("free", left, report.capacity_bytes, GREY)
        yield Bars(
            f"Memory per {chip}: what the compiler reserves",
            # Of devices without a known capacity, the bar is as long as its parts.
            max(report.capacity_bytes or 0, sum(part.amount for part in parts)),
            tuple(parts),
            tuple(lines),
            free,
        )
        yield from _largest("Largest temporaries", report.largest, report.peak_bytes)


def _explain_refusal(plan: PlanFigures, refusal: Refusal) -> Iterable[Bars | TextTable | Lines]:
    chip = device_noun(plan.num_chips, plan.num_devices)
    lines = ()
    if refusal.argument_bytes:
        rest = refusal.needed_bytes - refusal.argument_bytes
        lines = (
            f"{format_bytes(refusal.argument_bytes)} of it are arguments and outputs (parameters, "
            f"optimizer state, batch), {format_bytes(rest)} temporaries.",
        )
    if refusal.needed_bytes:
        parts = (
            _part(f"what a {chip} has", refusal.available_bytes, None, GREY),
            _part("too much", refusal.over_bytes, None, RED),
        )
        title = f"Memory per {chip}: the compiler refuses"
        yield Bars(title, sum(part.amount for part in parts), parts, lines)
    else:
        yield Lines("The compiler refuses", (refusal.text.strip(),))
    yield from _largest("Largest buffers", merge_lines(refusal.largest), refusal.needed_bytes)
    yield Lines("What to try", suggest_changes(plan))


def _part(name: str, num_bytes: int, capacity: int | None, color: str) -> Part:
    share = format_share(num_bytes / capacity) if capacity else ""
    return Part(name, num_bytes, format_bytes(num_bytes), share, color)


def _largest(title: str, buffers: Sequence[Buffer], of_bytes: int) -> Iterable[TextTable]:
    shown = [b for b in buffers[:NUM_ROWS] if b.num_bytes > _MIN_SHARE * of_bytes]
    if not shown:
        return
    columns = (
        Column("size", is_number=True),
        Column("of it padding", is_number=True, only_wide=True),
        Column("shape"),
        Column("made by"),
        Column("line", is_source=True),
    )
    rows = tuple(
        (
            format_bytes(buffer.num_bytes),
            format_bytes(buffer.padding_bytes) if buffer.padding_bytes else "",
            format_shape(buffer.shape) + format_count(buffer),
            format_op(buffer.op_name) or buffer.name,
            buffer.source or "",
        )
        for buffer in shown
    )
    rest = buffers[len(shown) :]
    sizes = format_bytes(sum(buffer.num_bytes for buffer in rest))
    notes = (f"And {len(rest)} more: {sizes}.",) if rest else ()
    yield TextTable(columns, rows, title, notes)


def format_count(buffer: Buffer) -> str:
    """Returns how many values of a line a buffer stands for; the others may have other shapes."""
    if buffer.count == 1:
        return ""
    is_equal = buffer.unpadded_bytes == buffer.count * shapes.num_bytes(buffer.shape)
    return f" x {buffer.count}" if is_equal else f" and {buffer.count - 1} more"


def list_replicated(plan: PlanFigures) -> Iterable[Lines]:
    """Yields the parameters that are not split inside a replica, if there are any."""
    report = plan.memory
    if report and report.replicated:
        line = (
            f"{format_share(report.replicated_share)} of the parameters' bytes are whole on every "
            f"device of a replica: {list_first(report.replicated, _MAX_NAMES)}."
        )
        yield Lines("Not split", (line,))


def _colors(names: Iterable[str], known: dict[str, str]) -> dict[str, str]:
    # A category without a color of its own gets the first spare color that is not in use.
    colors: dict[str, str] = {}
    for name in names:
        spare = next(
            (color for color in SPARE if color not in [*known.values(), *colors.values()]), GREY
        )
        colors[name] = known.get(name, spare)
    return colors
