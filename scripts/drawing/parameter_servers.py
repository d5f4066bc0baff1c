"""Roles with parameter servers: a coordinator, two workers and two servers."""

from typing import NamedTuple

import tpudist
from drawing.canvas import Canvas
from drawing.palettes import Palette


class Facts(NamedTuple):
    """The names that the picture shows."""

    coordinator: str
    calls: tuple[str, ...]
    strategy: str


def facts() -> Facts:
    """Takes the names from the classes, so that a renamed one changes the picture."""
    kind = tpudist.coordinator.ClusterCoordinator
    calls = tuple(x.__name__ for x in (kind.schedule, kind.join, kind.fetch))
    return Facts(kind.__name__, calls, tpudist.ParameterServerStrategy.__name__)


def draw(facts: Facts, palette: Palette) -> Canvas:
    """The coordinator on top, workers below it, servers and their logs at the bottom."""
    canvas = Canvas(palette, f"Roles of {facts.strategy}", 760, 470)
    calls = ", ".join(f"{x}()" for x in facts.calls)
    canvas.box(
        150, 8, 460, 56, [facts.coordinator, f"your program: {calls}"], "purple-fill", "purple"
    )
    for i, x in enumerate((150, 390)):
        middle = x + 110
        canvas.line((middle, 65), (middle, 128), both=True)
        canvas.box(
            x, 130, 220, 56, [f"Worker {i}", "runs one function at a time"], "blue-fill", "blue"
        )
        canvas.box(
            x,
            300,
            220,
            74,
            [f"Server {i}", "variables, optimizer state", "and tables"],
            "teal-fill",
            "teal",
        )
        canvas.line((middle, 187), (middle, 298), both=True, color="teal")
        canvas.line((middle, 375), (middle, 418), arrow=True)
        canvas.box(x, 420, 220, 38, ["Log on disk"], "pale")
    for begin, end in ((310, 450), (450, 310)):
        canvas.line((begin, 187), (end, 298), both=True, color="teal")
    canvas.text(10, 92, "functions go out,", color="muted")
    canvas.text(10, 110, "results come back", color="muted")
    canvas.text(10, 234, "Start of a function:", bold=True)
    canvas.text(10, 253, "read variables", color="muted")
    canvas.text(750, 234, "End of a function:", bold=True, anchor="end")
    canvas.text(750, 253, "send updates", color="muted", anchor="end")
    for i, line in enumerate(("log=FOLDER:", "written before", "the answer")):
        canvas.text(
            750, 408 + 19 * i, line, anchor="end", bold=i == 0, color="muted" if i else "ink"
        )
    return canvas
