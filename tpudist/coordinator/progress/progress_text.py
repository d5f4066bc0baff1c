"""A sample of a run as text: the single line of a log, and the parts that the table shows too."""

from __future__ import annotations

from collections.abc import Mapping

from tpudist.coordinator.progress.progress_sample import ProgressSample, WorkerFigures
from tpudist.ps.server_figures import ServerFigures
from tpudist.xla.estimate.sizes import format_bytes

MAX_SERVERS = 3
"""Largest number of servers whose traffic fits into a line."""


def format_line(sample: ProgressSample) -> str:
    """Returns one line, for a file or a pipe."""
    parts = [", ".join(format_counts(sample))]
    parts += [_format_slow_worker(x) for x in sample.workers if x.is_slow]
    figures = [x.figures for x in sample.servers]
    parts += [f"server {x.server}: {state}" for x in figures if (state := format_state(x))]
    if len(figures) <= MAX_SERVERS:
        parts += [
            f"server {x.server}: in {format_bytes(x.bytes_in)}, out {format_bytes(x.bytes_out)}"
            for x in figures
        ]
    return "; ".join(parts)


def format_counts(sample: ProgressSample) -> list[str]:
    """Returns the counts of the run, such as "117 done"; the caller joins them."""
    parts = [
        f"{sample.done:,} done",
        f"{format_rate(sample.per_s)}/s",
        f"{sample.in_flight} in flight",
        f"{sample.waiting:,} waiting",
        f"{sum(sample.retries.values())} retries" + _format_causes(sample.retries),
    ]
    if sample.failed:
        parts.append(f"{sample.failed} failed" + _format_causes(sample.errors))
    if sample.cancelled:
        parts.append(f"{sample.cancelled:,} cancelled")
    if sample.staleness:
        mean = sample.staleness_of_late
        recent = "-" if mean is None else f"{mean:.1f}"
        parts.append(f"staleness {recent} (most {max(sample.staleness)})")
    return [*parts, f"after {format_duration(sample.elapsed_s)}"]


def format_state(server: ServerFigures) -> str:
    """Returns the state of a server that does not answer; nothing if it does."""
    if server.state == "silent" and server.age_s is not None:
        return f"silent for {server.age_s:.0f} s"
    return "" if server.state == "answers" else server.state


def format_duration(seconds: float | None) -> str:
    """`0.0049` as "4.9 ms", `83` as "1:23"; nothing for None."""
    # The bounds are half a unit of the last digit below the next format, so that rounding never
    # shows "1000 ms" or "60.0 s".
    if seconds is None:
        return ""
    if seconds < 0.9995:
        return f"{seconds * 1000:.{1 if seconds < 0.00995 else 0}f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_rate(per_s: float | None) -> str:
    """`1234.5` as "1,234.5"; a dash for None."""
    return "-" if per_s is None else f"{per_s:,.1f}"


def format_closure(worker: WorkerFigures) -> str:
    """Returns the number and the function of a worker's closure, such as "7 step (a.py:3)"."""
    if worker.closure is None:
        return "-"
    return f"{worker.closure} {worker.function.rpartition('<locals>.')[2]}"


def _format_slow_worker(worker: WorkerFigures) -> str:
    text = f"worker {worker.worker} is slow"
    if worker.median_s is not None:
        text += f" (median {format_duration(worker.median_s)})"
    if worker.closure is not None:
        text += f", runs {format_closure(worker)} for {format_duration(worker.running_s)}"
    return text


def _format_causes(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{cause} {n}' for cause, n in counts.items())})" if counts else ""
