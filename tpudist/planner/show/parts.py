"""What a shown plan is made of, before it is known where: bars, tables and sentences."""

from __future__ import annotations

import dataclasses

from tpudist.display.text_tables import TextTable

NUM_ROWS = 8
"""Rows of a table before the rest is summed up."""

# Mid-tones, readable on white and on black; what has no colour of its own gets the next spare one.
BLUE, ORANGE, GREEN, PURPLE = "#4c8df5", "#e8913a", "#2fa56a", "#a070d8"
RED, TEAL, YELLOW, GREY = "#e2574c", "#2aa3a8", "#c9a227", "#8a8f98"
NETWORK_COLORS = {"ici": ORANGE, "dcn": RED, "host": YELLOW}
SPARE = (BLUE, PURPLE, ORANGE, TEAL, YELLOW, GREEN)


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a bar.

    Attributes:
        name: What it is.
        amount: How long it is, in the unit of the bar.
        text: Its amount, in words.
        share: Its share of the bar, in words; empty where that means nothing.
        color: "#rrggbb".
    """

    name: str
    amount: float
    text: str
    share: str
    color: str


@dataclasses.dataclass(frozen=True)
class Bars:
    """One bar made of parts.

    Attributes:
        title: What it shows.
        whole: The length of the full bar: a limit, or the sum of the parts.
        parts: In the order in which they lie in the bar.
        lines: Sentences about it.
        free: What is left of the bar, if that means something; it is not drawn.
    """

    title: str
    whole: float
    parts: tuple[Part, ...]
    lines: tuple[str, ...] = ()
    free: Part | None = None


@dataclasses.dataclass(frozen=True)
class Lines:
    """Sentences under a heading."""

    title: str
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """A whole plan.

    Attributes:
        title: Whether it fits, where.
        fits: The same, for a colour.
        facts: What is to be seen at first sight: (name, value).
        sections: The rest, most important first.
    """

    title: str
    fits: bool
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Bars | TextTable | Lines, ...]
