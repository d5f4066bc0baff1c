"""The parts of a report, independent of where it is shown: bars, tables and sentences."""

from __future__ import annotations

import dataclasses

from tpudist.display.text_tables import TextTable

MEMORY, STEP_TIME, SPEED = "memory", "step time", "speed"
"""Names of the most important facts."""
NUM_ROWS = 8
"""Maximum rows of a table; the other rows are summed up in a note."""

# Mid-tones, readable on white and on black.
BLUE, ORANGE, GREEN, PURPLE = "#4c8df5", "#e8913a", "#2fa56a", "#a070d8"
RED, TEAL, YELLOW, GREY = "#e2574c", "#2aa3a8", "#c9a227", "#8a8f98"
NETWORK_COLORS = {"ici": ORANGE, "dcn": RED, "host": YELLOW}
SPARE = (BLUE, PURPLE, ORANGE, TEAL, YELLOW, GREEN)


@dataclasses.dataclass(frozen=True)
class Part:
    """Part of a bar.

    Attributes:
        name: Name in the legend.
        amount: Length, in the unit of the bar.
        text: Amount with its unit.
        share: Share of the bar, such as "58%"; empty if a share has no meaning.
        color: Color, as "#rrggbb".
    """

    name: str
    amount: float
    text: str
    share: str
    color: str


@dataclasses.dataclass(frozen=True)
class Bars:
    """Bar that consists of parts.

    Attributes:
        title: Heading.
        whole: Length of the full bar: a limit, or the sum of the parts.
        parts: Parts from left to right.
        lines: Sentences below the bar.
        free: Rest of the bar, if it has a meaning; it is listed, but not drawn.
        error_bar: Low and high end of the sum of the parts, if it is an estimate.
    """

    title: str
    whole: float
    parts: tuple[Part, ...]
    lines: tuple[str, ...] = ()
    free: Part | None = None
    error_bar: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Lines:
    """Sentences under a heading."""

    title: str
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """Report of a plan or of a search.

    Attributes:
        title: Verdict, in one line.
        fits: Whether the verdict is good, which decides the color.
        facts: Most important facts, as (name, value).
        sections: Details, most important first.
    """

    title: str
    fits: bool
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Bars | TextTable | Lines, ...]
