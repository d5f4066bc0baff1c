"""Cost of a call on the host: hand-written `jax.jit`, tpudist and `nnx.jit`."""

from drawing import stored
from drawing.canvas import Canvas
from drawing.palettes import Palette

BARS = (
    ("jit_us", "jax.jit by hand", "muted", "pale"),
    ("tpudist_us", "tpudist", "blue", "blue-fill"),
    ("nnx_jit_us", "nnx.jit", "amber", "amber-fill"),
)


def facts() -> dict:
    """Reads what `scripts/bench.py --suites calls` found."""
    return stored.read("call-cost")


def draw(facts: dict, palette: Palette) -> Canvas:
    """A group of bars for each kind of call."""
    canvas = Canvas(palette, "Python time of one call", 760, 356)
    left, right = 160, 690
    most = max(x for group in facts.values() for x in group.values())
    canvas.text(10, 24, "Python time of one call, in milliseconds", bold=True, size=16)
    y = 40
    for name, group in facts.items():
        y += 30
        canvas.text(10, y, name, bold=True)
        y += 8
        for key, label, stroke, fill in BARS:
            if key not in group:
                continue
            width = (right - left) * group[key] / most
            canvas.text(left - 10, y + 16, label, anchor="end", color="muted")
            canvas.rect(left, y, max(width, 2), 22, fill, stroke, radius=2)
            ms = group[key] / 1000
            told = f"{ms:.3f}" if ms < 0.1 else f"{ms:.2f}"
            canvas.text(left + width + 8, y + 16, told, bold=True)
            y += 27
    return canvas
