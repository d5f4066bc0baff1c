"""A figure of matplotlib, which is an optional package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of a size in inches.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Drawing a chart needs matplotlib, which is not installed: pip install matplotlib."
        ) from error

    # Without pyplot: no display is needed, and the settings of the caller do not change.
    figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    return figure
