"""One picture of a run: training loss, held-out loss, and the baselines as lines."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def has_matplotlib() -> bool:
    """Whether curves can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_curves(
    path: Path,
    train: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
    baselines: Mapping[str, float],
    *,
    unit: str,
    title: str,
) -> None:
    """Writes a PNG. All values are in `unit`; points are `(step, value)`.

    Draws without a display and without touching the caller's matplotlib settings.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, values = np.array(train).T
        axes.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(values), color="tab:blue", linewidth=1.6, label="training")
    if held_out:
        steps, values = np.array(held_out).T
        axes.plot(
            steps, values, "o-", color="tab:red", linewidth=1.6, markersize=4, label="held out"
        )
    for name, value in baselines.items():
        axes.axhline(value, color="0.45", linestyle="--", linewidth=1.0)
        axes.annotate(
            f"{name} {value:.2f}",
            (1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="0.35",
        )
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if train or held_out:
        axes.legend(frameon=False, loc="lower left")
    figure.savefig(path)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Average over about a 20th of the run, around each step: it does not lag behind."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    steps = np.arange(len(values))
    # No further ahead than back, so that the steep beginning is not bent.
    reach = np.minimum(steps, max(1, len(values) // 40))
    first, end = steps - reach, np.minimum(steps + reach + 1, len(values))
    return (sums[end] - sums[first]) / (end - first)
