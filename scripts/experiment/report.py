"""The results of a run: the rows of a table, and files."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiment import curves, folder
from experiment.optimizers import warmup_cosine
from experiment.summary import count_parameters, describe_placement, describe_strategy
from experiment.units import Unit
from tpudist.processes.exit_codes import EXIT_PREEMPTED
from tpudist.strategy.strategy import Strategy
from tpudist.training import interrupt, metrics_writers
from tpudist.training.display import Display, format_clock
from tpudist.training.history import History
from tpudist.xla import compile_log

_MEASURED_ONCE = ("waited_for_data", "checkpoints", "compile_s", "total_s")

EXIT_CODES = {
    "finished": 0,
    "diverged": 1,
    "interrupted": interrupt.EXIT_CODE,
    "preempted": EXIT_PREEMPTED,
}


def tell_start(
    num_steps: int,
    learning_rate: float,
    begun: folder.RunStart,
    display: Display,
    history: History,
) -> None:
    """Reports how a resumed run continues."""
    done = history.num_steps
    if not begun.goes_on:
        return
    if done == num_steps:
        display.print(
            "To train longer, use a larger --steps. To start another run, use another --out, or "
            "--resume never."
        )
    elif begun.planned_steps != num_steps:
        before, now = (
            float(warmup_cosine(learning_rate, planned)(done))
            for planned in (begun.planned_steps, num_steps)
        )
        display.print(
            f"The run was planned for {begun.planned_steps} steps. The learning rate now falls "
            f"over {num_steps} steps: from here it is {now:.2g} instead of {before:.2g}."
        )


def finish(
    config: Any,
    history: History,
    unit: Unit,
    baselines: Mapping[str, float],
    rows: list[tuple[str, str]],
    title: str,
    display: Display,
    begun_s: float,
) -> int:
    """Writes and shows the results of a run; returns the exit code."""
    total_s = time.perf_counter() - begun_s
    known = read_summary(config.out) if was_finished(history) else {}
    if was_finished(history):  # this start did nothing: report the run
        total_s = known.get("total_s")
    if total_s is not None:
        took = "time since resuming" if history.resumed_at else "total time"
        rows = [*rows, (took, format_clock(total_s))]
    if jax.process_index() == 0:
        written = write(config.out, history, unit, baselines, config, title, total_s, known)
        rows.append(("written", ", ".join(written)))
        if missing := list_skipped_files():
            rows.append(("not written", ", ".join(missing)))
    display.print_table(f"{history.ended.capitalize()} after {history.num_steps} steps", rows)
    if history.ended == "diverged":
        display.print(
            "The loss is NaN or infinite. Try a smaller --learning-rate and another --out."
        )
    elif history.ended != "finished":
        display.print("Run the same command again to continue from here.")
    return EXIT_CODES[history.ended]


def rows(
    strategy: Strategy,
    model: Any,
    optimizer: Any,
    history: History,
    unit: Unit,
    baselines: Mapping[str, float],
) -> list[tuple[str, str]]:
    """(name, value) for people; `history` may be that of a run cut short."""
    step_s = history.mean_step_s
    told = [
        ("model", f"{type(model).__name__}, {count_parameters(model):,} parameters"),
        ("strategy", describe_strategy(strategy)),
        ("model placement", describe_placement(model)),
        ("optimizer placement", describe_placement(optimizer)),
    ]
    if compiles := _format_compiles():
        told.append(("compile time", compiles))
    if not math.isnan(step_s):
        timed = len(history.seconds) - history.num_earlier_seconds or len(history.seconds)
        told += [
            ("step time", f"{step_s * 1000:.0f} ms (mean of {timed})"),
            ("throughput", f"{unit.items_per_step / step_s:,.0f} {unit.items}/s"),
        ]
    if not math.isnan(history.waited_share):
        told.append(("waited for data", f"{history.waited_share:.1%} of the step time"))
    if history.num_saves:
        each = f"{history.num_saves} saved, which blocked training for {history.blocked_s:.2f} s"
        told.append(("checkpoints", each))
    if history.resumed_at:
        told.append(("resumed", _format_resumes(history.resumed_at)))
    if history.losses:
        told.append(("training loss", f"{final_loss(history) * unit.per_nat:.3f} {unit.name}"))
    score = math.nan
    if history.held_out:
        (_, score), *others = history.held_out[-1][1].items()
        told.append(("held-out loss", f"{score:.3f} {unit.name}"))
        told += [(f"  {name.replace('_', ' ')}", f"{value:.3f}") for name, value in others]
    told += [
        (f"  {name} baseline", _compare_with_baseline(value, score))
        for name, value in baselines.items()
    ]
    return told


def write(
    out: Path,
    history: History,
    unit: Unit,
    baselines: Mapping[str, float],
    config: Any,
    title: str,
    total_s: float | None,
    known: Mapping[str, Any],
) -> list[str]:
    """Writes `summary.json` and, with matplotlib, `curves.png`; returns all files of the run.

    Args:
        known: The summary of a run that had finished, whose measurements are kept.
    """
    facts = {
        "title": title,
        "ended": history.ended,
        "steps": history.num_steps,
        "resumed_at": history.resumed_at,
        "unit": unit.name,
        "training_loss": final_loss(history) * unit.per_nat if history.losses else None,
        "held_out": history.held_out[-1][1] if history.held_out else None,
        "baselines": dict(baselines),
        "mean_step_s": _nan_to_none(history.mean_step_s),
        "median_step_s": history.median_step_s if history.seconds else None,
        "waited_for_data": _nan_to_none(history.waited_share),
        "checkpoints": {"saved": history.num_saves, "blocked_s": history.blocked_s},
        "compile_s": {record.function: record.seconds for record in compile_log.compile_log()},
        "total_s": total_s,
        "config": dataclasses.asdict(config),
    }
    facts |= {name: known[name] for name in _MEASURED_ONCE if name in known}
    (out / "summary.json").write_text(json.dumps(facts, indent=2, default=str) + "\n")
    written = ["metrics.jsonl", "summary.json"]
    if (out / "checkpoints").exists():
        written.append("checkpoints/")
    if (out / "model").exists():
        written.append("model/")
    if metrics_writers.has_tensorboard():
        written.append("tensorboard/")
    if curves.has_matplotlib():
        curves.draw_curves(
            out / "curves.png",
            [
                (step, loss * unit.per_nat)
                for step, loss in enumerate(history.losses, start=history.first_step)
            ],
            [(step, next(iter(measured.values()))) for step, measured in history.held_out],
            baselines,
            unit=unit.name,
            title=title,
        )
        written.append("curves.png")
    return [str(out / name) for name in written]


def was_finished(history: History) -> bool:
    """Whether all steps were done before this start."""
    return history.ended == "finished" and history.restored is not None and not history.num_saves


def read_summary(out: Path) -> dict[str, Any]:
    """Reads `summary.json`; returns an empty dict if it is missing or unreadable."""
    try:
        return dict(json.loads((out / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def list_skipped_files() -> list[str]:
    """Files that a run leaves out because what writes them is not installed, with the remedy."""
    hints = {
        "tensorboard (pip install tensorboardX)": metrics_writers.has_tensorboard(),
        "curves.png (pip install matplotlib)": curves.has_matplotlib(),
    }
    return [hint for hint, installed in hints.items() if not installed]


def final_loss(history: History) -> float:
    """Mean of the last 20 training losses, in nats: one step's loss depends on its batch."""
    return statistics.fmean(history.losses[-20:])


def _format_resumes(steps: Sequence[int]) -> str:
    times = "once" if len(steps) == 1 else f"{len(steps)} times"
    shown = ", ".join(map(str, steps[-5:]))
    return f"{times}, after step {shown if len(steps) <= 5 else '..., ' + shown}"


def _nan_to_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _compare_with_baseline(baseline: float, score: float) -> str:
    if math.isnan(score):
        return f"{baseline:.3f}"
    verdict = "beaten by" if score < baseline else "not beaten, worse by"
    return f"{baseline:.3f}, {verdict} {abs(baseline - score):.3f}"


def _format_compiles() -> str:
    records = compile_log.compile_log()
    if not records:
        return ""  # a run that had finished compiles nothing
    each = ", ".join(f"{record.function} {record.seconds:.1f} s" for record in records)
    return f"{sum(record.seconds for record in records):.1f} s ({each})"
