"""The loss of one model on three meshes: the curves lie on top of each other."""

import math

import jax
import numpy as np
import optax
from flax import nnx

import tpudist
from drawing import stored
from drawing.canvas import Canvas
from drawing.palettes import Palette

ROWS, BATCH, EPOCHS = 500, 64, 8
TICKS = (0.05, 0.1, 0.2, 0.5, 1.0)
MESHES = {
    "1 device": lambda: tpudist.OneDeviceStrategy(),
    "8 replicas": lambda: tpudist.MirroredStrategy(),
    "2 replicas x fsdp=4": lambda: tpudist.TPUStrategy(replica_axes={"fsdp": 4}),
}


def measure() -> None:
    """Trains on all meshes, and stores the losses; each epoch ends with a partial batch."""
    losses = {name: [float(f"{x:.7g}") for x in _train(make())] for name, make in MESHES.items()}
    alone, *others = (np.array(x) for x in losses.values())
    difference = max(float(np.max(np.abs(x / alone - 1))) for x in others)
    stored.write(
        "curves",
        "python scripts/pictures.py --measure curves",
        {"losses": losses, "largest_relative_difference": float(f"{difference:.2g}")},
    )


def _train(strategy) -> list[float]:
    x = np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)
    rows = {"x": x, "y": np.tanh(x @ np.linspace(-1, 1, 16, dtype=np.float32))[:, None]}

    def make() -> nnx.Sequential:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 1, rngs=rngs))

    def train_step(model, optimizer, batch):
        def loss_fn(model):
            losses = ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)
            return tpudist.compute_average_loss(losses)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return tpudist.get_replica_context().all_reduce("sum", loss)

    model = strategy.create(make)
    optimizer = strategy.create(lambda m: tpudist.Optimizer(optax.adam(0.01), m), model)
    data = tpudist.NumpyDataset(rows).shuffle(seed=0).batch(BATCH).repeat(EPOCHS)
    batches = strategy.experimental_distribute_dataset(data)
    return [float(jax.device_get(strategy.run(train_step, (model, optimizer, x)))) for x in batches]


def facts() -> dict:
    """Reads the stored losses."""
    return stored.read("curves")


def draw(facts: dict, palette: Palette) -> Canvas:
    """Loss over steps: a broad line, a narrow line on it, and dots on both."""
    canvas = Canvas(palette, "Loss on one device and on two meshes of eight devices", 760, 400)
    losses = facts["losses"]
    steps = len(next(iter(losses.values())))
    left, right, top, bottom = 64, 740, 50, 318

    def place(step: int, loss: float) -> tuple[float, float]:
        share = math.log(loss / TICKS[0]) / math.log(TICKS[-1] / TICKS[0])
        return left + (right - left) * step / (steps - 1), bottom - (bottom - top) * share

    canvas.text(10, 22, "Loss", bold=True)
    for tick in TICKS:
        y = place(0, tick)[1]
        canvas.line((left, y), (right, y), width=0.4)
        canvas.text(left - 8, y + 5, f"{tick:g}", anchor="end", color="muted")
    for step in range(0, steps, 8):
        canvas.text(place(step, 1)[0], bottom + 21, str(step), anchor="middle", color="muted")
    canvas.text(right, bottom + 21, "step", anchor="end", color="muted")
    broad, narrow, dots = ([place(i, x) for i, x in enumerate(y)] for y in losses.values())
    canvas.line(*broad, color="amber-fill", width=12)
    canvas.line(*narrow, color="blue", width=2)
    for x, y in dots[::3]:
        canvas.dot(x, y, radius=5, color="purple")
    first, second, third = losses
    canvas.line((80, 17), (112, 17), color="amber-fill", width=12)
    canvas.text(122, 22, first)
    canvas.line((220, 17), (252, 17), color="blue", width=2)
    canvas.text(262, 22, second)
    canvas.dot(380, 17, radius=5, color="purple")
    canvas.text(394, 22, third)
    largest = f"{facts['largest_relative_difference']:.0e}".replace("e-0", "e-")
    told = f"Every 8th batch is partial. The largest difference is {largest} of the loss."
    canvas.text(402, 376, told, color="muted", anchor="middle")
    return canvas
