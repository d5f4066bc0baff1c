"""A sample of a run as people read it: a table for a terminal of any size, and a single line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tpudist.coordinator.progress.progress_sample import ProgressSample, WorkerFigures

GAP = "  "
LEAST_FUNCTION = 14
"""So many characters of what a worker runs are left of it before a column goes."""
LEAST_SERVERS = 3
"""So many servers are shown in a terminal that is too low for all workers and servers."""

# Columns that go, one after the other, where a terminal is too narrow; then lines are cut.
_WORKER_COLUMNS_TO_DROP = ("restarts", "failed", "retries", "median", "runs closure")
_SERVER_COLUMNS_TO_DROP = ("variables", "rows", "out", "in", "restarts", "holds")
_TEXT_COLUMNS = ("runs closure", "")  # to the left; numbers are to the right


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        text: What it says.
        kind: `text`, `head`, `row`, or `alarm` for what wants to be seen.
    """

    text: str
    kind: str = "text"


def table_lines(sample: ProgressSample, width: int, height: int | None = None) -> list[Line]:
    """The table, of lines of at most `width` characters, and as many as `height` has place for.

    If there are more workers, the slow ones are shown, and those that have run something longest.
    """
    lines = [*_summary(sample, width), Line("")]
    servers = [x.figures.describe(x.bytes_in_per_s, x.bytes_out_per_s) for x in sample.servers]
    num_servers, num_workers = len(servers), len(sample.workers)
    if height is not None:
        left = max(height - len(lines) - 3, 2)  # two heads, and an empty line between
        if num_workers + num_servers > left:
            num_servers = min(num_servers, max(LEAST_SERVERS, left // 3))
            num_workers = min(num_workers, max(left - num_servers - 1, 1))
    shown, hidden = _choose_workers(sample.workers, num_workers)
    rows = [_worker_row(x, sample) for x in shown]
    _drop_empty(rows, ("failed", "retries", "restarts"))
    lines += _rows(rows, [x.is_slow or x.state == "starts" for x in shown], width, _fit_workers)
    if hidden:
        done = sum(x.done for x in hidden)
        lines.append(Line(f"and {len(hidden)} more workers: {done:,} done"[:width]))
    lines.append(Line(""))
    _drop_empty(servers, ("rows", "restarts"))
    if num_servers < len(servers):
        num_servers -= 1  # for the line that says so
    first = sorted(range(len(servers)), key=lambda i: (not servers[i][""], i))[:num_servers]
    rows = [servers[i] for i in sorted(first)]
    lines += _rows(rows, [bool(x[""]) for x in rows], width, _fit_servers)
    if num_servers < len(servers):
        lines.append(Line(f"and {len(servers) - num_servers} more servers"[:width]))
    return lines


def describe_sample(sample: ProgressSample) -> str:
    """One line, for a file or a pipe."""
    parts = _summary_parts(sample)
    slow = [_describe_slow(x) for x in sample.workers if x.is_slow]
    words = [x.figures.describe(x.bytes_in_per_s, x.bytes_out_per_s) for x in sample.servers]
    states = [f"server {x['server']}: {x['']}" for x in words if x[""]]
    traffic = [f"server {x['server']}: in {x['in']}, out {x['out']}" for x in words]
    if len(traffic) > LEAST_SERVERS:
        traffic = []
    return "; ".join([", ".join(parts), *slow, *states, *traffic])


def _describe_slow(worker: WorkerFigures) -> str:
    median = "" if worker.median_s is None else f" (median {format_duration(worker.median_s)})"
    runs = ""
    if worker.closure is not None:
        runs = f", runs {_function(worker)} for {format_duration(worker.running_s)}"
    return f"worker {worker.worker} is slow{median}{runs}"


def format_duration(seconds: float | None) -> str:
    """`0.0049` as "4.9 ms", `83` as "1:23"; nothing for None."""
    if seconds is None:
        return ""
    if seconds < 0.9995:
        return f"{seconds * 1000:.{1 if seconds < 0.00995 else 0}f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# The summary.


def _summary_parts(sample: ProgressSample) -> list[str]:
    parts = [
        f"{sample.done:,} done",
        f"{_rate(sample.per_s)}/s",
        f"{sample.in_flight} in flight",
        f"{sample.waiting:,} waiting",
        f"{sum(sample.retries.values())} retries" + _causes(sample.retries),
    ]
    if sample.failed:
        parts.append(f"{sample.failed} failed" + _causes(sample.errors))
    if sample.cancelled:
        parts.append(f"{sample.cancelled:,} cancelled")
    if sample.staleness:
        mean = sample.staleness_of_late
        of_late = "-" if mean is None else f"{mean:.1f}"
        parts.append(f"staleness {of_late} (most {max(sample.staleness)})")
    return [*parts, f"after {format_duration(sample.elapsed_s)}"]


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:,.1f}"


def _causes(counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    return f" ({', '.join(f'{cause} {count}' for cause, count in counts.items())})"


def _summary(sample: ProgressSample, width: int) -> list[Line]:
    """The parts in as many lines as they need."""
    lines: list[str] = []
    for part in _summary_parts(sample):
        if lines and len(lines[-1]) + len(GAP) + len(part) <= width:
            lines[-1] += GAP + part
        else:
            lines.append(part)
    return [Line(x[:width]) for x in lines]


# The rows.


def _choose_workers(
    workers: Sequence[WorkerFigures], count: int
) -> tuple[list[WorkerFigures], list[WorkerFigures]]:
    """Those to be shown, in their order, and the others."""
    urgent = sorted(
        workers,
        key=lambda x: (not x.is_slow, x.state != "starts", -(x.running_s or 0.0), x.worker),
    )
    shown = {x.worker for x in urgent[:count]}
    return [x for x in workers if x.worker in shown], [x for x in workers if x.worker not in shown]


def _worker_row(worker: WorkerFigures, sample: ProgressSample) -> dict[str, str]:
    note = worker.state if worker.state in ("starts", "left") else ""
    return {
        "worker": f"{worker.worker}",
        "done": f"{worker.done:,}",
        "per s": _rate(worker.per_s),
        "median": format_duration(worker.median_s),
        "failed": f"{worker.failed}",
        "retries": f"{worker.retries}",
        "restarts": f"{worker.restarts}",
        "runs closure": _function(worker),
        "for": format_duration(worker.running_s),
        "": "SLOW" if worker.is_slow else note,
    }


def _function(worker: WorkerFigures) -> str:
    if worker.closure is None:
        return "-"
    return f"{worker.closure} {worker.function.rpartition('<locals>.')[2]}"


def _drop_empty(rows: list[dict[str, str]], heads: Sequence[str]) -> None:
    """Leaves out the columns that have nothing but 0."""
    for head in heads:
        if all(row[head] == "0" for row in rows):
            for row in rows:
                del row[head]


def _fit_workers(rows: list[dict[str, str]], width: int) -> None:
    too_wide = max(_total_width(rows) - width, 0)
    room = max(_width(rows, "runs closure") - too_wide, LEAST_FUNCTION)
    for row in rows:
        row["runs closure"] = _shorten(row["runs closure"], room)
    _drop_columns(rows, _WORKER_COLUMNS_TO_DROP, width)


def _shorten(function: str, room: int) -> str:
    """Without the place first, then without the end."""
    if len(function) > room:
        function = function.partition(" (")[0]
    return function if len(function) <= room else f"{function[: room - 2]}.."


def _fit_servers(rows: list[dict[str, str]], width: int) -> None:
    _drop_columns(rows, _SERVER_COLUMNS_TO_DROP, width)


def _drop_columns(rows: list[dict[str, str]], heads: Sequence[str], width: int) -> None:
    for head in heads:
        if _total_width(rows) <= width:
            return
        for row in rows:
            row.pop(head, None)


def _rows(
    rows: list[dict[str, str]],
    alarms: Sequence[bool],
    width: int,
    fit: Callable[[list[dict[str, str]], int], None],
) -> list[Line]:
    if not rows:
        return []
    fit(rows, width)
    widths = {head: _width(rows, head) for head in rows[0]}

    def line(row: Mapping[str, str]) -> str:
        cells = (
            text.ljust(widths[head]) if head in _TEXT_COLUMNS else text.rjust(widths[head])
            for head, text in row.items()
        )
        return GAP.join(cells).rstrip()[:width]

    head = Line(line({x: x for x in rows[0]}), "head")
    kinds = ("alarm" if alarm else "row" for alarm in alarms)
    return [head, *(Line(line(x), kind) for x, kind in zip(rows, kinds, strict=False))]


def _width(rows: Sequence[Mapping[str, str]], head: str) -> int:
    return max(len(head), *(len(row[head]) for row in rows))


def _total_width(rows: Sequence[Mapping[str, str]]) -> int:
    return sum(_width(rows, x) for x in rows[0]) + len(GAP) * (len(rows[0]) - 1)
