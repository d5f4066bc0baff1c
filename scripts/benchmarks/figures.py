"""One figure of a benchmark: tpudist's value, the baseline's value, and the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """A quantity of one subject, measured twice in the same run."""

    suite: str
    """Suite that measured it."""
    subject: str
    """Subject of the measurement, such as "300 arrays, donated"."""
    quantity: str
    """Name of the quantity, with its unit."""
    ours: float
    """Value of tpudist."""
    baseline: float | None
    """Value of the hand-written program, or of the comparison that `quantity` names; None without
    a baseline."""
    target: str = ""
    """Target as text; empty if the figure only shows the scale."""
    met: bool | None = None
    """Whether the target is met; None without a target."""
    by_difference: bool = False
    """Whether the table shows the difference to the baseline rather than the ratio."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further values, only in the JSON."""

    @property
    def ratio(self) -> float | None:
        """Ours over the baseline; None without one."""
        if self.baseline is None:
            return None
        if self.baseline:
            return self.ours / self.baseline
        return 1.0 if self.ours == 0 else float("inf")

    @property
    def against_baseline(self) -> str:
        """Ratio or difference as text."""
        if self.baseline is None:
            return ""
        by_difference = f"{self.ours - self.baseline:+.1f}"
        return by_difference if self.by_difference else f"{self.ratio:.3f} x"

    def as_json(self) -> dict[str, Any]:
        """Returns all fields, and the ratio."""
        return dataclasses.asdict(self) | {"ratio": self.ratio}


def at_most_more(figure: Figure, extra: float) -> Figure:
    """Sets the target: tpudist takes at most `extra` more than the baseline."""
    met = figure.ours - figure.baseline <= extra
    return dataclasses.replace(figure, target=f"<= +{extra:g}", met=met, by_difference=True)


def at_most_times(figure: Figure, ratio: float) -> Figure:
    """Sets the target: tpudist takes at most `ratio` times the baseline."""
    return dataclasses.replace(figure, target=f"<= {ratio:.2f} x", met=figure.ratio <= ratio)


def at_least_times(figure: Figure, ratio: float) -> Figure:
    """Sets the target: tpudist's value is at least `ratio` times the baseline."""
    return dataclasses.replace(figure, target=f">= {ratio:.2f} x", met=figure.ratio >= ratio)


def at_most(figure: Figure, limit: float) -> Figure:
    """Sets the target: tpudist's value is at most `limit`, independent of the baseline."""
    return dataclasses.replace(figure, target=f"<= {limit:g}", met=figure.ours <= limit)


def equal_within(figure: Figure, tolerance: float) -> Figure:
    """Sets the target: the ratio is between 1 - `tolerance` and 1 + `tolerance`."""
    met = abs(figure.ratio - 1) <= tolerance
    return dataclasses.replace(figure, target=f"1 +- {tolerance:g}", met=met)


def show(console: Console, title: str, figures: Iterable[Figure]) -> None:
    """Prints figures as a table, grouped by subject."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("tpudist", "baseline", "against it"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("met", no_wrap=True)
    for subject, group in groupby(figures, lambda figure: figure.subject):
        table.add_row(f"[bold]{subject}[/]")
        for figure in group:
            table.add_row(
                f"  {figure.quantity}",
                _number(figure.ours),
                "" if figure.baseline is None else _number(figure.baseline),
                figure.against_baseline,
                figure.target,
                {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[figure.met],
            )
    console.print(table)


def _number(value: float) -> str:
    """Four digits or so: people compare ratios, and the JSON has them all."""
    if value >= 1e6:
        return f"{value / 1e6:,.2f} M"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"
