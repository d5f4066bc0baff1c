"""One training step on four replicas: rows in, gradients, one all-reduce, equal weights."""

import jax
import numpy as np
import optax
from flax import nnx

import tpudist
from drawing.canvas import Canvas
from drawing.palettes import Palette

REPLICAS, ROWS = 4, 64


def facts() -> list[tuple[str, str]]:
    """The collectives of the compiled step: their kinds, and the axes of the mesh."""
    strategy = tpudist.MirroredStrategy(jax.devices()[:REPLICAS])
    model = strategy.create(lambda: nnx.Linear(16, 1, rngs=nnx.Rngs(0)))
    optimizer = strategy.create(lambda m: tpudist.Optimizer(optax.sgd(0.1), m), model)
    rows = tpudist.NumpyDataset(np.ones((ROWS, 16), np.float32)).batch(ROWS)
    batch = next(iter(strategy.experimental_distribute_dataset(rows)))

    def train_step(model, optimizer, batch):
        def loss_fn(model):
            return tpudist.compute_average_loss((model(batch) ** 2).sum(-1))

        grads = nnx.grad(loss_fn)(model)
        optimizer.update(model, grads)

    plan = strategy.plan(train_step, (model, optimizer, batch))
    return sorted({(x.kind, " ".join(x.axes)) for x in plan.collectives})


def draw(facts: list[tuple[str, str]], palette: Palette) -> Canvas:
    """A column for each replica; the collective lies across all of them."""
    [(kind, axis)] = facts
    canvas = Canvas(palette, "One training step on four replicas", 760, 398)
    for label, y in (("Batch", 52), ("Gradients", 142), ("Collective", 232), ("Weights", 323)):
        canvas.text(10, y, label, bold=True)
    each = ROWS // REPLICAS
    for i in range(REPLICAS):
        x, width = 110 + 162 * i, 150
        middle = x + width / 2
        canvas.text(middle, 18, f"replica {i}", color="muted", anchor="middle")
        first, last = each * i, each * (i + 1) - 1
        canvas.box(x, 28, width, 38, [f"rows {first}–{last}"], "blue-fill", "blue")
        canvas.line((middle, 67), (middle, 104), arrow=True)
        canvas.box(x, 106, width, 60, ["gradients", "from its own rows"], "amber-fill", "amber")
        canvas.line((middle, 167), (middle, 204), arrow=True)
        canvas.line((middle, 251), (middle, 288), arrow=True)
        canvas.box(x, 290, width, 60, ["new weights", "the same on each"], "teal-fill", "teal")
    canvas.box(
        110,
        206,
        636,
        44,
        [f"one {kind} over the axis '{axis}': the sum of all gradients"],
        "purple-fill",
        "purple",
    )
    told = "optimizer.update(model, grads) computes the sum. The result equals that of one device."
    canvas.text(428, 382, told, color="muted", anchor="middle")
    return canvas
