"""A killed process: when the others and a spare one make the next step."""

import sys
import tempfile
from pathlib import Path

from drawing import stored
from drawing.canvas import Canvas
from drawing.palettes import Palette

ROOT = Path(__file__).resolve().parents[2]
VICTIM, STEP = 1, 12
BEFORE, AFTER = 0.8, 2.0  # the last steps before, and the first ones after, in seconds


def measure() -> None:
    """Kills one of two processes of a run with a spare one, and stores the times of all steps."""
    sys.path[:0] = [str(ROOT / "tests" / "shared"), str(ROOT / "tests")]
    import signal
    import time

    import survival_runs

    options = ("-n", "2", "--devices-per-process", "2", "--spares", "1")
    folder = Path(tempfile.mkdtemp())
    with survival_runs.Run(folder, *options) as run:
        run.wait_for_step(STEP, of_all=True)
        killed = time.time()
        pid = run.signal(VICTIM, signal.SIGKILL)
        run.wait_for(lambda: "generation 2" in run.output(), "generation 2")
        meeting = time.time() - killed
        seen = run.wait()
    assert seen.code == 0, seen.output
    pids = sorted({x["pid"] for x in seen.lines}, key=lambda x: (x != pid, x))
    names = {pid: f"process {VICTIM}"}
    for line in seen.lines:
        names.setdefault(line["pid"], "spare" if line["generation"] > 1 else "process 0")
    steps = {
        names[pid]: [round(x["time"] - killed, 3) for x in seen.lines if x["pid"] == pid]
        for pid in pids
    }
    figures = {
        "steps_s": dict(sorted(steps.items())),
        "new_generation_s": round(meeting, 3),
        "next_step_s": round(seen.seconds_to_new_step(killed), 3),
    }
    stored.write(
        "lost-process",
        "python scripts/pictures.py --measure lost-process",
        figures,
        load_average=stored.load_average(),
    )


def facts() -> dict:
    """Reads the stored times."""
    return stored.read("lost-process")


def draw(facts: dict, palette: Palette) -> Canvas:
    """A lane for each process, a tick for each step; time runs from left to right."""
    canvas = Canvas(palette, "A process is killed, and the others continue", 760, 300)
    left, right, top, step = 110, 740, 66, 62
    after = facts["next_step_s"] + AFTER

    def place(seconds: float) -> float:
        return left + (right - left) * (seconds + BEFORE) / (after + BEFORE)

    lanes = facts["steps_s"]
    bottom = top + step * len(lanes)
    for row, (name, times) in enumerate(lanes.items()):
        y = top + step * row
        shown = [x for x in times if -BEFORE <= x <= after]
        killed, spare = max(times) < 0.1, min(times) > 0
        canvas.text(10, y + 23, name, bold=True)
        canvas.rect(left, y, place(0) - left if killed else right - left, 36, "panel", radius=3)
        for x in shown:
            canvas.line((place(x), y + 6), (place(x), y + 30), color="teal", width=2)
        if killed:
            x = place(facts["new_generation_s"]) + 8
            canvas.text(x, y + 23, "killed (SIGKILL)", color="red", bold=True)
        if name == "process 0":
            x = place(facts["new_generation_s"]) + 8
            canvas.text(x, y + 23, "connects and compiles", color="muted")
        if spare:
            canvas.text(left + 10, y + 23, "waits", color="muted")
    canvas.line((place(0), 40), (place(0), bottom), color="red", width=2)
    canvas.text(place(0), 30, "0 s", anchor="middle", color="red", bold=True)
    joined = place(facts["new_generation_s"])
    canvas.line((joined, 40), (joined, bottom), color="amber", width=2, dashed=True)
    canvas.text(
        joined + 6,
        30,
        f"{facts['new_generation_s']:.2g} s: new generation",
        color="amber",
        bold=True,
    )
    again = place(facts["next_step_s"])
    canvas.line((again, 40), (again, bottom), color="teal", width=2, dashed=True)
    canvas.text(again + 6, 52, f"{facts['next_step_s']:.2g} s: next step", color="teal", bold=True)
    canvas.line((left, bottom + 14), (left, bottom + 30), color="teal", width=2)
    canvas.text(
        left + 10,
        bottom + 28,
        "one step. No process restarts, and the losses stay bitwise identical.",
        color="muted",
    )
    return canvas
