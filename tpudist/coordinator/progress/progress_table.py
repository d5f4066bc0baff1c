"""A sample of a run as a rich table, for a terminal of any size.

`progress_display` imports this only when it shows a table, because importing rich takes time.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from tpudist.coordinator.progress.progress_sample import (
    ProgressSample,
    ServerProgress,
    WorkerFigures,
)
from tpudist.coordinator.progress.progress_text import (
    format_closure,
    format_counts,
    format_duration,
    format_rate,
    format_state,
)
from tpudist.xla.estimate.sizes import format_bytes

GAP = 2
"""Spaces between columns."""
MIN_FUNCTION = 14
"""Characters of a function's name that remain before a narrow terminal loses a column."""
MIN_SERVERS = 3
"""Least number of servers in a terminal that is too low for all workers and servers."""

_NOTE = ""  # the column without a header: SLOW, or the state of a worker or server
# A narrow terminal loses these columns, one after the other.
_WORKER_COLUMNS_TO_DROP = ("restarts", "failed", "retries", "median", "runs closure")
_SERVER_COLUMNS_TO_DROP = ("variables", "rows", "out", "in", "restarts", "holds")
_TEXT_COLUMNS = ("runs closure", _NOTE)  # aligned to the left; numbers are aligned to the right

Row = dict[str, str]  # column -> cell


def make_page(sample: ProgressSample, width: int, height: int | None = None) -> RenderableType:
    """Returns the counts, the table of workers and the table of servers.

    If `height` lines are too few for all workers, slow and long-running ones are shown.
    """
    # A count keeps its words together: textwrap does not break at no-break spaces.
    counts = (" " * GAP).join(x.replace(" ", "\xa0") for x in format_counts(sample))
    lines = textwrap.wrap(counts, width, break_on_hyphens=False)
    parts: list[RenderableType] = [_make_line(line.replace("\xa0", " ")) for line in lines]

    num_workers, num_servers = len(sample.workers), len(sample.servers)
    if height is not None:
        # An empty line and a header above each table.
        num_rows = max(height - len(parts) - 4, 2)
        if num_workers + num_servers > num_rows:
            num_servers = min(num_servers, max(MIN_SERVERS, num_rows // 3))
            num_workers = min(num_workers, max(num_rows - num_servers - 1, 1))

    workers = _choose_workers(sample.workers, num_workers)
    rows = [_make_worker_row(x) for x in workers]
    _drop_zeros(rows, ("failed", "retries", "restarts"))
    alarms = [x.is_slow or x.state == "starts" for x in workers]
    parts += ["", _make_table(rows, alarms, width, _WORKER_COLUMNS_TO_DROP)]
    if num_hidden := len(sample.workers) - len(workers):
        shown = {x.worker for x in workers}
        done = sum(x.done for x in sample.workers if x.worker not in shown)
        parts.append(_make_line(f"and {num_hidden} more workers: {done:,} done"))

    rows = [_make_server_row(x) for x in sample.servers]
    _drop_zeros(rows, ("rows", "restarts"))
    if num_servers < len(rows):
        num_servers -= 1  # for the line that counts the others
    silent_first = sorted(rows, key=lambda row: not row[_NOTE])[:num_servers]
    rows = [row for row in rows if row in silent_first]
    alarms = [bool(row[_NOTE]) for row in rows]
    parts += ["", _make_table(rows, alarms, width, _SERVER_COLUMNS_TO_DROP)]
    if num_hidden := len(sample.servers) - len(rows):
        parts.append(_make_line(f"and {num_hidden} more servers"))
    return Constrain(Group(*parts), width)


def format_table(sample: ProgressSample, width: int) -> str:
    """Returns the whole table as text without colors."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(make_page(sample, width))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _make_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="crop")


def _choose_workers(workers: Sequence[WorkerFigures], count: int) -> list[WorkerFigures]:
    """Returns the `count` workers that need attention most, in the order of their numbers."""
    urgent = sorted(
        workers,
        key=lambda x: (not x.is_slow, x.state != "starts", -(x.running_s or 0.0), x.worker),
    )
    return sorted(urgent[:count], key=lambda x: x.worker)


def _make_worker_row(worker: WorkerFigures) -> Row:
    note = worker.state if worker.state in ("starts", "left") else ""
    return {
        "worker": f"{worker.worker}",
        "done": f"{worker.done:,}",
        "per s": format_rate(worker.per_s),
        "median": format_duration(worker.median_s),
        "failed": f"{worker.failed}",
        "retries": f"{worker.retries}",
        "restarts": f"{worker.restarts}",
        "runs closure": format_closure(worker),
        "for": format_duration(worker.running_s),
        _NOTE: "SLOW" if worker.is_slow else note,
    }


def _make_server_row(server: ServerProgress) -> Row:
    figures = server.figures
    in_per_s, out_per_s = server.bytes_in_per_s, server.bytes_out_per_s
    return {
        "server": f"{figures.server}",
        "in": format_bytes(figures.bytes_in),
        "in/s": "-" if in_per_s is None else format_bytes(in_per_s),
        "out": format_bytes(figures.bytes_out),
        "out/s": "-" if out_per_s is None else format_bytes(out_per_s),
        "holds": format_bytes(figures.bytes_held),
        "variables": f"{figures.variables:,}",
        "rows": f"{figures.rows:,}",
        "restarts": f"{figures.restarts}",
        _NOTE: format_state(figures),
    }


def _drop_zeros(rows: list[Row], columns: Sequence[str]) -> None:
    for column in columns:
        if all(row[column] == "0" for row in rows):
            for row in rows:
                del row[column]


def _make_table(
    rows: list[Row], alarms: Sequence[bool], width: int, columns_to_drop: Sequence[str]
) -> Table:
    for column in columns_to_drop:
        if _min_width(rows) > width:
            for row in rows:
                row.pop(column, None)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in rows[0] if rows else ():
        is_function = column == "runs closure"
        table.add_column(
            column,
            justify="left" if column in _TEXT_COLUMNS else "right",
            # rich shortens only columns that may wrap; the cells of this one do not wrap either.
            no_wrap=not is_function,
            min_width=MIN_FUNCTION if is_function else None,
        )
    for row, alarm in zip(rows, alarms, strict=True):
        cells = (Text(cell, no_wrap=True, overflow="ellipsis") for cell in row.values())
        table.add_row(*cells, style="yellow" if alarm else None)
    return table


def _min_width(rows: Sequence[Row]) -> int:
    widths = {x: max(len(x), *(len(row[x]) for row in rows)) for x in rows[0]} if rows else {}
    if "runs closure" in widths:
        widths["runs closure"] = MIN_FUNCTION
    return sum(widths.values()) + GAP * (len(widths) - 1)
