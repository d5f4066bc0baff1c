"""Placement of the values of a small model: split, mirrored, or one per replica."""

from typing import NamedTuple

import numpy as np
from flax import nnx

import tpudist
from drawing.canvas import Canvas
from drawing.mesh import FSDP, HUES, in_order
from drawing.palettes import Palette

ROWS = 64
HOW = {
    "batch": "split over all devices",
    "kernel": "split in each replica",
    "bias": "mirrored",
    "metric": "one per replica",
}


class Facts(NamedTuple):
    """A value, as `describe_placement` names it, and which part of it each device has."""

    name: str
    shape: tuple[int, ...]
    split: str
    parts: list[int]


def facts() -> list[Facts]:
    """Asks `describe_placement`, and the arrays for their parts."""
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": FSDP})
    model = strategy.create(lambda: nnx.Linear(64, 128, rngs=nnx.Rngs(0)))
    with strategy.scope():
        metric = tpudist.Variable(
            0.0,
            synchronization=tpudist.VariableSynchronization.ON_READ,
            aggregation=tpudist.VariableAggregation.SUM,
        )
    rows = tpudist.NumpyDataset(np.ones((ROWS, 64), np.float32)).batch(ROWS)
    batch = next(iter(strategy.experimental_distribute_dataset(rows)))
    tree = {"batch": batch, "kernel": model.kernel, "bias": model.bias, "metric": metric}
    arrays = [batch.array, model.kernel[...], model.bias[...], metric._value]
    table = {x.name.split(".")[0]: x for x in tpudist.describe_placement(tree).arrays}
    return [
        Facts(name, table[name].shape, table[name].split, _parts(array))
        for name, array in zip(tree, arrays, strict=True)
    ]


def _parts(array) -> list[int]:
    places = [str(x.index) for x in in_order(array)]
    known = list(dict.fromkeys(places))
    return [known.index(place) for place in places]


def draw(facts: list[Facts], palette: Palette) -> Canvas:
    """A row for each value, a column for each device; equal parts have equal numbers."""
    canvas = Canvas(palette, "Where values are placed on two replicas of four devices", 760, 380)
    left, step, cell = 222, 66, 62
    for replica in range(2):
        x = left + 4 * step * replica
        canvas.rect(x - 4, 8, 4 * step - 1, 338, "panel")
        canvas.text(x + 2 * step - 4, 28, f"replica {replica}", anchor="middle", bold=True)
    for device in range(8):
        x = left + step * device + cell / 2
        canvas.text(x, 50, f"device {device}", anchor="middle", size=13, color="muted")
    for row, value in enumerate(facts):
        y = 62 + 72 * row
        canvas.text(10, y + 14, value.name, bold=True, size=16)
        canvas.text(10, y + 34, HOW[value.name])
        canvas.text(
            10,
            y + 53,
            f"{list(value.shape)}: {value.split}",
            color="muted",
            size=13,
            room=left - 12,
        )
        for device, part in enumerate(value.parts):
            shared = value.parts.count(part)
            hue = HUES[part] if 1 < shared < len(value.parts) else "muted"
            fill = f"{hue}-fill" if hue != "muted" else "pale" if shared > 1 else "none"
            text = f"part {part}" if max(value.parts) else "all"
            x = left + step * device
            canvas.box(x, y, cell - 3, 58, [text], fill, hue, size=13, mono=True)
    told = "Within a row, the same part number means the same numbers."
    canvas.text(380, 370, told, color="muted", anchor="middle")
    return canvas
