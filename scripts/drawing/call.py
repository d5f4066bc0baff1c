"""The life of one `strategy.run` call: what the first call does, and what later calls do."""

from pathlib import Path

from drawing.canvas import Canvas
from drawing.palettes import Palette

PACKAGE = Path(__file__).resolve().parents[2] / "tpudist"
STAGES = (
    ("Trace", "run/trace.py", ("Calls your step once,", "as for one replica")),
    ("Checks", "run/program_checks.py", ("Replicas stay equal,", "or it raises an error")),
    ("Lowering", "lowering/compile.py", ("One XLA program", "for all replicas")),
)
RUN = ("Run", "run/step.py", ("Feeds the arguments, runs the", "program, writes state back"))
RESULTS = (
    "Results",
    "run/outputs/results.py",
    ("Plain array if equal on all", "replicas, else PerReplica"),
)
CACHE = ("Which program?", "run/step_cache.py", ("By function, shapes,", "dtypes and options"))


def facts() -> tuple[tuple, ...]:
    """The stages; each names a file of tpudist that is there.

    Raises:
        FileNotFoundError: A file has another name now: change the stage, and see what it does.
    """
    for _, file, _ in (*STAGES, RUN, RESULTS, CACHE):
        if not (PACKAGE / file).is_file():
            raise FileNotFoundError(f"tpudist/{file}, which the picture 'call' names")
    return STAGES


def draw(facts: tuple[tuple, ...], palette: Palette) -> Canvas:
    """The first call goes through the upper lane; all calls end in the lower one."""
    canvas = Canvas(palette, "The life of a strategy.run call", 760, 386)
    canvas.text(10, 24, "strategy.run(step, args=(model, optimizer, batch))", mono=True)
    canvas.line((100, 34), (100, 58), arrow=True)
    _draw_stage(canvas, 10, 60, 182, CACHE, "pale", "muted")
    canvas.rect(212, 44, 538, 162, "none", dashed=True)
    canvas.text(224, 66, "First call with these shapes", color="amber", bold=True)
    for i, stage in enumerate(facts):
        x = 224 + 176 * i
        _draw_stage(canvas, x, 80, 166, stage, "amber-fill", "amber")
    for x in (390, 566):
        canvas.line((x, 134), (x + 10, 134), arrow=True, color="amber")
    canvas.line((193, 110), (223, 110), arrow=True, color="amber")
    canvas.text(112, 230, "Later calls: program found", color="teal", bold=True)
    canvas.line((100, 171), (100, 316), (223, 316), arrow=True, color="teal")
    canvas.line((659, 189), (659, 232), (349, 232), (349, 258), arrow=True, color="amber")
    _draw_stage(canvas, 224, 260, 250, RUN, "teal-fill", "teal")
    canvas.line((475, 316), (505, 316), arrow=True)
    _draw_stage(canvas, 508, 260, 242, RESULTS, "teal-fill", "teal")
    return canvas


def _draw_stage(
    canvas: Canvas,
    x: float,
    y: float,
    width: float,
    stage: tuple,
    fill: str,
    stroke: str,
) -> None:
    name, file, lines = stage
    canvas.rect(x, y, width, 110, fill, stroke)
    canvas.text(x + 10, y + 26, name, bold=True, size=16, room=width - 14)
    for i, line in enumerate(lines):
        canvas.text(x + 8, y + 50 + 18 * i, line, size=13, room=width - 12)
    canvas.text(x + 8, y + 96, file, size=13, color="muted", room=width - 12)
