"""Distance of five libraries from one device after an epoch with a partial batch."""

import math

from drawing import stored
from drawing.canvas import Canvas
from drawing.palettes import Palette

LOW, HIGH = 1e-8, 1.0


def facts() -> dict:
    """Reads what `scripts/bench.py --suites comparison` found."""
    return stored.read("comparison")


def draw(facts: dict, palette: Palette) -> Canvas:
    """A row for each library, and a dot on a logarithmic axis."""
    canvas = Canvas(palette, "Distance from one device after a partial batch", 760, 392)
    left, right, top, step = 180, 730, 60, 52
    libraries = facts["libraries"]
    bottom = top + step * len(libraries)

    def place(value: float) -> float:
        return left + (right - left) * math.log(value / LOW) / math.log(HIGH / LOW)

    canvas.text(10, 24, "Distance of the weights from those of one device", bold=True, size=16)
    for power in range(-8, 1, 2):
        x = place(10.0**power)
        canvas.line((x, top - 14), (x, bottom - 10), width=0.4)
        name = "1" if power == 0 else f"1e{power}"
        canvas.text(x, bottom + 10, name, anchor="middle", color="muted")
    canvas.text(
        left, bottom + 40, "smaller is better; each grid line is 100 times the last", color="muted"
    )
    for row, library in enumerate(libraries):
        y = top + step * row + 14
        value = library["distance"]
        good = value is not None and value < 1e-6
        hue = "teal" if good else "red"
        canvas.text(10, y, library["name"], bold=True, size=15)
        canvas.text(10, y + 19, library["how"], color="muted", size=13)
        if value is None:
            told = "raises an error: 36 rows on 8 devices"
            canvas.box(left, y - 11, 360, 32, [told], "red-fill", hue)
            continue
        canvas.line((left, y + 4), (place(value), y + 4), color=hue, width=3)
        canvas.dot(place(value), y + 4, radius=7, color=hue)
        told = f"{value:.0e}".replace("e-0", "e-") if good else f"{value:g}"
        canvas.text(place(value) + 14, y + 9, told, bold=True, color=hue)
    return canvas
