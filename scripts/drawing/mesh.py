"""Eight devices as two replicas of four: the rows and the part of a weight that each device has."""

from typing import NamedTuple

import numpy as np
from flax import nnx

import tpudist
from drawing.canvas import Canvas
from drawing.palettes import Palette

ROWS, FSDP, SHAPE = 64, 4, (512, 2048)
HUES = ("blue", "teal", "amber", "purple")
Range = tuple[int, int]


class Facts(NamedTuple):
    """First and last index: of the rows of each replica, and of each device in it."""

    replicas: list[Range]
    rows: list[Range]
    columns: list[Range]


def facts() -> Facts:
    """Asks a strategy, a batch and a model."""
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": FSDP})
    model = strategy.create(lambda: nnx.Linear(*SHAPE, rngs=nnx.Rngs(0)))
    batches = tpudist.NumpyDataset(np.arange(ROWS)).batch(ROWS)
    batch = next(iter(strategy.experimental_distribute_dataset(batches)))
    replicas = [np.asarray(x) for x in strategy.experimental_local_results(batch)]
    rows = [np.asarray(x.data).ravel() for x in in_order(batch.array)]
    columns = [x.index[1].indices(SHAPE[1]) for x in in_order(model.kernel[...])]
    ends = [(int(x[0]), int(x[-1])) for x in [*replicas, *rows]]
    return Facts(ends[: len(replicas)], ends[len(replicas) :], [(x[0], x[1] - 1) for x in columns])


def in_order(array):
    """The shards of an array by device."""
    return sorted(array.addressable_shards, key=lambda x: x.device.id)


def draw(facts: Facts, palette: Palette) -> Canvas:
    """The batch on top, the two replicas below it, each with the whole kernel in four parts."""
    canvas = Canvas(palette, "Eight devices as two replicas of four", 760, 396)
    canvas.text(10, 22, f"Global batch of {ROWS} rows", bold=True)
    for replica, (first, last) in enumerate(facts.replicas):
        x, width = 10 + 375 * replica, 365
        canvas.box(x, 34, width, 32, [f"rows {first}–{last}"], "pale")
        canvas.line((x + width / 2, 67), (x + width / 2, 94), arrow=True)
        canvas.rect(x, 96, width, 256)
        canvas.text(x + 12, 121, f"Replica {replica}", bold=True, size=16)
        told = f"runs your step on {last - first + 1} rows"
        canvas.text(x + width - 12, 121, told, color="muted", anchor="end")
        canvas.text(x + 12, 150, f"A weight of {SHAPE[0]} x {SHAPE[1]}, split over {FSDP} devices")
        for i in range(FSDP):
            _draw_device(canvas, x + 11 + 86 * i, i, FSDP * replica + i, facts)
    told = "Each replica stores all weights once. Gradients are summed over the replicas."
    canvas.text(380, 380, told, color="muted", anchor="middle")
    return canvas


def _draw_device(canvas: Canvas, x: float, part: int, device: int, facts: Facts) -> None:
    width, hue = 83, HUES[part]
    canvas.rect(x, 162, width, 176, "none")
    for i in range(FSDP):
        fill, stroke = (f"{hue}-fill", hue) if i == part else ("none", "muted")
        canvas.rect(x + 13.5 + 14 * i, 172, 14, 56, fill, stroke, radius=0)
    middle = x + width / 2
    canvas.text(middle, 251, f"device {device}", anchor="middle", bold=True, size=13)
    (first, last), (left, right) = facts.rows[device], facts.columns[device]
    canvas.text(middle, 276, f"rows {first}–{last}", anchor="middle", size=13, room=width)
    canvas.text(middle, 304, "columns", anchor="middle", size=13, color=hue)
    columns = f"{left}–{right}"
    canvas.text(middle, 323, columns, anchor="middle", size=13, color=hue, room=width)
