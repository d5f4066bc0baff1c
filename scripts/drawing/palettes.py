"""The colors of pictures: one palette for light pages, and one for dark pages.

Text is drawn in `ink`, `muted` or a strong color. Each has a contrast of at least 4.5 to the page
and to every fill, which `tests/policy/test_pictures.py` checks.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Palette:
    """Colors of a picture.

    Attributes:
        name: "light" or "dark", as in the names of the files.
        pages: The backgrounds on which the picture is shown: of the site, and of GitHub.
        text: Colors of text and of lines, by name.
        fills: Colors of boxes, by name.
    """

    name: str
    pages: tuple[str, ...]
    text: Mapping[str, str]
    fills: Mapping[str, str]

    def color(self, name: str) -> str:
        """The color of a name; "none" stays."""
        return name if name == "none" else {**self.text, **self.fills}[name]


LIGHT = Palette(
    "light",
    ("#ffffff",),
    {
        "ink": "#1f2328",
        "muted": "#505862",
        "blue": "#1d4fa8",
        "teal": "#0b5d57",
        "amber": "#7a4a00",
        "purple": "#5b35a3",
        "red": "#a3222c",
    },
    {
        "panel": "#f4f6fa",
        "pale": "#e9edf3",
        "blue-fill": "#d9e6fc",
        "teal-fill": "#cdeee8",
        "amber-fill": "#fbe7c2",
        "purple-fill": "#e6dcfa",
        "red-fill": "#fbdcdc",
    },
)
DARK = Palette(
    "dark",
    ("#1e2129", "#0d1117"),
    {
        "ink": "#eceff4",
        "muted": "#bcc3ce",
        "blue": "#9dc1ff",
        "teal": "#6fdccd",
        "amber": "#f1c673",
        "purple": "#cdb6ff",
        "red": "#ffa8a5",
    },
    {
        "panel": "#272b35",
        "pale": "#333845",
        "blue-fill": "#23406f",
        "teal-fill": "#174a46",
        "amber-fill": "#523c12",
        "purple-fill": "#443069",
        "red-fill": "#5f282c",
    },
)
PALETTES = (LIGHT, DARK)


def contrast(first: str, second: str) -> float:
    """The contrast of two colors by WCAG 2, from 1 to 21."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
