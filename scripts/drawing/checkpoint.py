"""A checkpoint that eight devices wrote, and that four devices restore."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import tpudist
from drawing.canvas import Canvas
from drawing.mesh import in_order
from drawing.palettes import Palette

SHAPE = (64, 128)
ENTRIES = (
    ("checkpoints/", "", "folder of CheckpointManager"),
    ("  100/", ".", "one step: complete, or not there"),
    ("    tpudist/metadata", "tpudist/metadata", "names, shapes, dtypes"),
    ("    tpudist_manifest.json", "tpudist_manifest.json", "checksum of each file"),
    ("    state/", "state", "one global value per array"),
    ("      ocdbt.process_0/", "state/ocdbt.process_0", "what process 0 wrote"),
)


class Facts(NamedTuple):
    """Number of parts of the kernel when it is written and when it is restored."""

    written: int
    restored: int


def facts() -> Facts:
    """Writes a checkpoint, looks for its files, and restores it on fewer devices.

    Raises:
        FileNotFoundError: A checkpoint has other files now: change ENTRIES.
    """
    with tempfile.TemporaryDirectory() as folder:
        before, state = _make(8, seed=0)
        state.step = 100
        with tpudist.checkpoint.CheckpointManager(state, folder) as manager:
            manager.save()
        for _, path, _ in ENTRIES:
            if path and not (Path(folder) / "100" / path).exists():
                raise FileNotFoundError(f"{path}, which the picture 'checkpoint' shows")
        after, state = _make(4, seed=1)
        with tpudist.checkpoint.CheckpointManager(state, folder) as manager:
            manager.restore_or_initialize()
    np.testing.assert_array_equal(before.kernel[...], after.kernel[...])
    return Facts(*(len({str(s.index) for s in in_order(x.kernel[...])}) for x in (before, after)))


def _make(num_devices: int, seed: int):
    devices = jax.devices()[:num_devices]
    strategy = tpudist.TPUStrategy(devices=devices, replica_axes={"fsdp": num_devices})
    model = strategy.create(lambda: nnx.Linear(*SHAPE, rngs=nnx.Rngs(seed)))
    optimizer = strategy.create(lambda m: tpudist.Optimizer(optax.sgd(0.1), m), model)
    return model, tpudist.TrainState(model, optimizer)


def draw(facts: Facts, palette: Palette) -> Canvas:
    """Eight devices on top, the folder in the middle, four devices below."""
    canvas = Canvas(palette, "A checkpoint of eight devices, restored on four", 760, 404)
    _draw_devices(canvas, 10, "Save", facts.written, "blue")
    canvas.line((430, 62), (430, 92), arrow=True)
    canvas.rect(110, 94, 640, 178, "panel")
    canvas.text(10, 188, "On disk", bold=True, size=16)
    for i, (name, _, told) in enumerate(ENTRIES):
        y = 122 + 27 * i
        indent = len(name) - len(name.lstrip())
        canvas.text(130 + 9 * indent, y, name.strip(), mono=True)
        canvas.text(420, y, told, color="muted")
    canvas.line((430, 273), (430, 303), arrow=True)
    _draw_devices(canvas, 306, "Restore", facts.restored, "teal")
    told = "The same values in another layout: an array is stored once, whatever the mesh."
    canvas.text(430, 386, told, color="muted", anchor="middle")
    return canvas


def _draw_devices(canvas: Canvas, y: float, name: str, number: int, hue: str) -> None:
    canvas.text(10, y + 22, name, bold=True, size=16)
    canvas.text(10, y + 42, f"{number} devices", color="muted")
    step = 640 / number
    for i in range(number):
        lines = [f"1/{number}", f"device {i}"]
        canvas.box(110 + step * i, y, step - 6, 50, lines, f"{hue}-fill", hue, size=13)
