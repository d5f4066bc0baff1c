"""The packages of tpudist in their layers: a package imports only packages of lower layers."""

from pathlib import Path

import layers
from drawing.canvas import Canvas
from drawing.palettes import Palette

PACKAGE = Path(__file__).resolve().parents[2] / "tpudist"
COLUMNS, WIDTH, HEIGHT, GAP = 4, 174, 46, 6
WORDS = {
    "__init__": "all public names",
    "__main__": "the command line",
    "array_types": "types of array trees",
    "checkpoint": "saving and restoring",
    "cli": "subcommands of tpudist",
    "cluster_resolver": "who takes part in a run",
    "compat": "older TensorFlow names",
    "context": "the strategy in scope",
    "coordinator": "asynchronous workers",
    "display": "tables on screens",
    "engine": "threads and processes",
    "errors": "error classes",
    "experimental": "experimental names",
    "goodput": "where the time went",
    "gradients": "from loss to update",
    "input": "datasets and batches",
    "keras": "Keras 3 models and fit",
    "library_objects": "optional libraries",
    "lowering": "one program for all",
    "models": "reference models",
    "options": "options of calls",
    "planner": "plans for TPU slices",
    "port": "porting of programs",
    "preemption": "ends and lost processes",
    "processes": "processes that connect",
    "programs": "proofs about programs",
    "protobuf_wire": "protocol buffers",
    "ps": "parameter servers",
    "pytest_plugin": "emulated devices",
    "reduce_op": "sum and mean",
    "reductions": "reductions of values",
    "run": "one strategy.run call",
    "state": "variables and models",
    "step_boundaries": "between two steps",
    "strategies": "the strategy classes",
    "strategy": "what strategies share",
    "supervisor": "tpudist launch, doctor",
    "testing": "communication budgets",
    "training": "the training loop",
    "values": "values of replicas",
    "verification": "strategy.verify",
    "xla": "JAX compiler, devices",
}
NAMES = {"__init__": "tpudist", "__main__": "python -m tpudist"}


def facts() -> list[list[str]]:
    """The packages of each layer, the highest first, by their imports.

    Raises:
        KeyError: A package has no words yet: add some to WORDS.
    """
    modules = layers.modules_of(PACKAGE)
    imports = layers.imports_of(modules, "tpudist", types=True)
    layer_of = layers.layers_of(layers.packages_of(imports))
    if missing := sorted(layer_of.keys() ^ WORDS.keys()):
        raise KeyError(f"WORDS of the picture 'layers' does not fit these packages: {missing}")
    return [
        sorted(x for x, layer in layer_of.items() if layer == number)
        for number in range(max(layer_of.values()), 0, -1)
    ]


def draw(facts: list[list[str]], palette: Palette) -> Canvas:
    """A band for each layer, with a box for each package."""
    rows = [-(-len(packages) // COLUMNS) for packages in facts]
    height = sum(count * (HEIGHT + GAP) + GAP + 4 for count in rows) + 50
    canvas = Canvas(palette, "The packages of tpudist in layers", 760, height)
    canvas.text(10, 24, "A package imports only packages of lower layers.", bold=True, size=16)
    y = 42.0
    for i, (packages, count) in enumerate(zip(facts, rows, strict=True)):
        tall = count * (HEIGHT + GAP) + GAP
        canvas.rect(4, y, 752, tall, "panel", "panel")
        canvas.text(20, y + tall / 2 + 5, str(len(facts) - i), anchor="middle", color="muted")
        for j, package in enumerate(packages):
            x = 38 + (WIDTH + GAP) * (j % COLUMNS)
            top = y + GAP + (HEIGHT + GAP) * (j // COLUMNS)
            lines = [NAMES.get(package, package), WORDS[package]]
            canvas.box(x, top, WIDTH, HEIGHT, lines, "blue-fill", "blue", size=13)
        y += tall + 4
    return canvas
