"""A small SVG canvas: boxes, text, arrows and bars, with colors by name.

Numbers are rounded to a tenth of a pixel, so that every version of Python and JAX writes the same
bytes. Text that does not fit its box or the picture is a ValueError, by a width that common fonts
do not exceed.
"""

from collections.abc import Sequence
from html import escape

from drawing.palettes import Palette

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"
SIZE = 14
LETTER, WIDE_LETTER, MONO_LETTER, BOLD = 0.52, 0.64, 0.605, 1.2
"""Mean widths of a small letter and of a digit or capital, in sizes of the font; those of bold."""
MIN_SIZE = 13


def width_of(text: str, size: float = SIZE, *, bold: bool = False, mono: bool = False) -> float:
    """About how wide a text is, in px."""
    if mono:
        return len(text) * size * MONO_LETTER
    letters = sum(WIDE_LETTER if x.isdigit() or x.isupper() else LETTER for x in text)
    return letters * size * (BOLD if bold else 1)


def number(value: float) -> str:
    """A length, rounded to a tenth."""
    text = f"{value:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")


class Canvas:
    """A picture that is drawn."""

    def __init__(self, palette: Palette, title: str, width: int, height: int):
        """Nothing is drawn yet; `title` is read out, and says what the picture shows."""
        self.palette, self.title, self.width, self.height = palette, title, width, height
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "panel",
        stroke: str = "muted",
        *,
        radius: float = 6,
        dashed: bool = False,
    ) -> None:
        """A rectangle. The fill "hatch" means padding or nothing."""
        paint = "url(#hatch)" if fill == "hatch" else self.palette.color(fill)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" '
            f'height="{number(height)}" rx="{number(radius)}" fill="{paint}" '
            f'stroke="{self.palette.color(stroke)}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = SIZE,
        color: str = "ink",
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        room: float | None = None,
    ) -> None:
        """A line of text; `y` is its base line, `anchor` what `x` is: start, middle or end.

        Raises:
            ValueError: The text is wider than `room`, or leaves the picture.
        """
        wide = width_of(text, size, bold=bold, mono=mono)
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        if (room is not None and wide > room) or left < 0 or left + wide > self.width:
            raise ValueError(f"{text!r} is about {wide:.0f} px wide: no room for it at {x:.0f}.")
        if size < MIN_SIZE or not size <= y <= self.height - size / 4:
            raise ValueError(f"{text!r} is too small, or outside of the picture.")
        style = "".join(
            [
                f' font-size="{number(size)}"' if size != SIZE else "",
                f' text-anchor="{anchor}"' if anchor != "start" else "",
                ' font-weight="600"' if bold else "",
                f' font-family="{MONO}"' if mono else "",
            ]
        )
        self._parts.append(
            f'<text x="{number(x)}" y="{number(y)}" fill="{self.palette.color(color)}"{style}>'
            f"{escape(text, quote=False)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: Sequence[str],
        fill: str = "panel",
        stroke: str = "muted",
        *,
        size: float = SIZE,
        mono: bool = False,
        dashed: bool = False,
        color: str = "ink",
    ) -> None:
        """A rectangle with centered lines, the first of them bold unless `mono`."""
        self.rect(x, y, width, height, fill, stroke, dashed=dashed)
        step = size + 4
        top = y + height / 2 - step * len(lines) / 2 + size * 0.95
        for i, line in enumerate(lines):
            bold = i == 0 and not mono
            self.text(
                x + width / 2,
                top + step * i,
                line,
                size=size,
                color=color if i == 0 else "muted" if color == "ink" else color,
                anchor="middle",
                bold=bold,
                mono=mono,
                room=width - 8,
            )

    def line(
        self,
        *points: tuple[float, float],
        color: str = "muted",
        width: float = 1.5,
        arrow: bool = False,
        both: bool = False,
        dashed: bool = False,
    ) -> None:
        """A line through points, with an arrowhead at its end, or at both."""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        heads = f' marker-end="url(#to-{color})"' if arrow or both else ""
        heads += f' marker-start="url(#to-{color})"' if both else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.palette.color(color)}" '
            f'stroke-width="{number(width)}"{dash}{heads}/>'
        )

    def dot(self, x: float, y: float, radius: float = 4, color: str = "ink") -> None:
        """A filled circle."""
        self._parts.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" '
            f'fill="{self.palette.color(color)}"/>'
        )

    def svg(self) -> str:
        """The picture as a file."""
        color = self.palette.color
        marked = sorted({x for x in self.palette.text if f"url(#to-{x})" in "".join(self._parts)})
        defs = [
            f'<marker id="to-{x}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{color(x)}"/></marker>'
            for x in marked
        ]
        if any("url(#hatch)" in part for part in self._parts):
            defs.append(
                '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
                f'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" '
                f'stroke="{color("muted")}" stroke-width="2"/></pattern>'
            )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" '
                f'height="{self.height}" viewBox="0 0 {self.width} {self.height}" role="img" '
                f'font-family="{SANS}" font-size="{SIZE}">',
                f"<title>{escape(self.title, quote=False)}</title>",
                *(["<defs>", *defs, "</defs>"] if defs else []),
                *self._parts,
                "</svg>\n",
            ]
        )
