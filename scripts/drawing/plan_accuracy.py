"""The planner's estimates against the step times of nine published runs."""

from drawing import stored
from drawing.canvas import Canvas
from drawing.palettes import Palette

TICKS = (0.9, 1.0, 1.1, 1.2, 1.3)


def facts() -> dict:
    """Reads what `scripts/bench.py --suites published` found."""
    return stored.read("plan-accuracy")


def draw(facts: dict, palette: Palette) -> Canvas:
    """A row for each run; two dots, one for each libtpu, on the ratio of the times."""
    canvas = Canvas(palette, "Estimated over published step time of nine TPU runs", 760, 452)
    left, right, top, step = 240, 640, 78, 34
    runs, bottom = facts["runs"], 78 + 34 * len(facts["runs"])

    def place(ratio: float) -> float:
        return left + (right - left) * (ratio - TICKS[0]) / (TICKS[-1] - TICKS[0])

    canvas.text(10, 24, "Estimated step time / published step time", bold=True, size=16)
    for i, (version, error) in enumerate(
        zip(facts["libtpu"], facts["median_error_percent"], strict=True)
    ):
        x = 10 + 350 * i
        _draw_dot(canvas, x + 8, 48, i)
        canvas.text(x + 22, 53, f"libtpu {version}: median error {error} %")
    for tick in TICKS:
        x = place(tick)
        exact = tick == 1
        canvas.line(
            (x, top - 8),
            (x, bottom - 4),
            color="teal" if exact else "muted",
            width=2 if exact else 0.4,
        )
        canvas.text(x, bottom + 16, f"{tick:g}", anchor="middle", color="muted")
    canvas.text(place(1.0), bottom + 38, "exact", anchor="middle", color="teal", bold=True)
    canvas.text(place(1.2), bottom + 38, "estimate too slow", anchor="middle", color="muted")
    for row, run in enumerate(runs):
        y = top + step * row + 12
        canvas.text(10, y + 5, run["name"], room=left - 16)
        ratios = run["ratio"]
        canvas.line((place(min(ratios)), y), (place(max(ratios)), y), color="muted", width=2)
        for i, ratio in reversed(list(enumerate(ratios))):
            _draw_dot(canvas, place(ratio), y, i)
        text = " / ".join(dict.fromkeys(f"{x:.2f}" for x in ratios))
        canvas.text(750, y + 5, text, anchor="end", size=13, color="muted")
    return canvas


def _draw_dot(canvas: Canvas, x: float, y: float, i: int) -> None:
    """The first libtpu is a dot, the second one a ring that stays visible around it."""
    if i == 0:
        canvas.dot(x, y, radius=4, color="blue")
    else:
        canvas.rect(x - 7, y - 7, 14, 14, "none", "amber", radius=3)
