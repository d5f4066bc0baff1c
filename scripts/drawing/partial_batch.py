"""The last batch of an epoch: how many rows each replica sees, and where padding is."""

from typing import NamedTuple

import numpy as np

import tpudist
from drawing.canvas import Canvas
from drawing.palettes import Palette

BATCH, ROWS = 64, 52


class Facts(NamedTuple):
    """Rows of each replica in a full batch and in the partial one; rows of a padded part."""

    full: list[int]
    partial: list[int]
    part: int


def facts() -> Facts:
    """Asks a strategy for the batches of an epoch."""
    strategy = tpudist.MirroredStrategy()
    rows = tpudist.NumpyDataset(np.arange(BATCH + ROWS)).batch(BATCH)
    full, partial = (
        [x.shape[0] for x in strategy.experimental_local_results(batch)]
        for batch in strategy.experimental_distribute_dataset(rows)
    )
    return Facts(full, partial, max(full))


def draw(facts: Facts, palette: Palette) -> Canvas:
    """Each replica is a column of cells: rows are filled, padding is hatched."""
    canvas = Canvas(palette, "A partial batch on eight replicas", 760, 340)
    _draw_batch(canvas, 10, f"Full batch: {sum(facts.full)} rows", facts.full, facts.part)
    title = f"Last batch: {sum(facts.partial)} rows"
    _draw_batch(canvas, 390, title, facts.partial, facts.part)
    canvas.rect(72, 303, 16, 16, "teal-fill", "teal", radius=2)
    canvas.text(96, 316, "row that your step sees")
    canvas.rect(318, 303, 16, 16, "hatch", radius=2)
    canvas.text(342, 316, "padding: not in shapes, losses, metrics or gradients")
    return canvas


def _draw_batch(canvas: Canvas, left: float, title: str, rows: list[int], part: int) -> None:
    canvas.text(left, 24, title, bold=True, size=16)
    canvas.text(left, 48, "replica", color="muted")
    canvas.text(left, 268, "rows", color="muted")
    for replica, count in enumerate(rows):
        x = left + 62 + 37 * replica
        canvas.text(x + 15, 48, str(replica), anchor="middle", color="muted")
        for i in range(part):
            fill, stroke = ("teal-fill", "teal") if i < count else ("hatch", "muted")
            canvas.rect(x, 60 + 23 * i, 30, 20, fill, stroke, radius=2)
        canvas.text(x + 15, 268, str(count), anchor="middle", bold=True)
