"""Progress as text: the table on wide, narrow and low terminals, and the line of a log."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from tpudist.coordinator.progress.progress_sample import (
    ProgressSample,
    ServerProgress,
    WorkerFigures,
)
from tpudist.coordinator.progress.progress_table import format_table, make_page
from tpudist.coordinator.progress.progress_text import format_duration, format_line
from tpudist.ps.server_figures import ServerFigures

FUNCTION = "main.<locals>.train_step_of_the_model (train_the_model.py:112)"


def worker(index, **figures):
    runs = {"state": "runs", "closure": 12345 + index, "function": FUNCTION, "running_s": 0.004}
    return WorkerFigures(
        index, **runs | {"done": 3000, "per_s": 200.0, "median_s": 0.0049} | figures
    )


def server(index, **figures):
    sizes = {"variables": 31, "bytes_held": 10**8, "bytes_in": 10**9, "bytes_out": 10**10}
    figures = {"state": "answers", "age_s": 0.0} | sizes | figures
    return ServerProgress(ServerFigures(index, **figures), 1e7, 2e7)


def sample(workers=None, servers=None, **counts):
    workers = [worker(0), worker(1)] if workers is None else workers
    servers = [server(0), server(1)] if servers is None else servers
    counts = {
        "time": 0.0, "elapsed_s": 133.0, "finished": 6000, "done": 6000, "failed": 0,
        "cancelled": 0, "per_s": 400.0, "in_flight": 2, "waiting": 250, "retries": {}, "errors": {},
        "staleness": {0: 4, 3: 2}, "staleness_of_late": 1.0,
    } | counts  # fmt: skip
    return ProgressSample(workers=tuple(workers), servers=tuple(servers), **counts)


def render(sample, width, height=None):
    """Returns the lines of a page, and those of them that are yellow."""
    console = Console(file=io.StringIO(), width=width, color_system="standard", force_terminal=True)
    with console.capture() as capture:
        console.print(make_page(sample, width, height))
    lines = capture.get().splitlines()
    plain = [Text.from_ansi(line).plain.rstrip() for line in lines]
    return plain, [x for x, line in zip(plain, lines, strict=True) if "\x1b[33m" in line]


def test_table_of_a_run_with_retries_an_error_and_a_slow_worker():
    workers = [worker(0), worker(1, is_slow=True, running_s=83, retries=1, restarts=1)]
    shown = sample(
        workers, retries={"worker died": 1, "too late": 2}, failed=1, errors={"KeyError": 1}
    )
    assert format_table(shown, 91) == (
        "6,000 done  400.0/s  2 in flight  250 waiting  3 retries (worker died 1, too late 2)\n"
        "1 failed (KeyError 1)  staleness 1.0 (most 3)  after 2:13\n"
        "\n"
        "worker   done  per s  median  retries  restarts  runs closure                     for\n"
        "     0  3,000  200.0  4.9 ms        0         0  12345 train_step_of_the_mod…  4.0 ms\n"
        "     1  3,000  200.0  4.9 ms        1         1  12346 train_step_of_the_mod…    1:23"
        "  SLOW\n"
        "\n"
        "server       in      in/s       out     out/s     holds  variables\n"
        "     0  954 MiB  9.54 MiB  9.31 GiB  19.1 MiB  95.4 MiB         31\n"
        "     1  954 MiB  9.54 MiB  9.31 GiB  19.1 MiB  95.4 MiB         31"
    )


def test_slow_workers_and_silent_servers_are_yellow():
    workers = [worker(0), worker(1, is_slow=True), worker(2, state="starts", closure=None)]
    servers = [server(0), server(1, state="silent", age_s=12.0), server(2, state="starts")]
    _, alarms = render(sample(workers, servers), 120)
    assert [line.split()[0] for line in alarms] == ["1", "2", "1", "2"]
    assert alarms[2].endswith("silent for 12 s")


@pytest.mark.parametrize(("num_workers", "num_servers"), [(1, 1), (4, 2), (40, 9), (300, 2)])
def test_table_fits_each_terminal_and_shows_the_slow_worker(num_workers, num_servers):
    """Below 40 columns, some of the slow worker's columns may be missing."""
    workers = [worker(i, is_slow=i == num_workers - 1, retries=i) for i in range(num_workers)]
    shown = sample(workers, [server(i, rows=i, restarts=i) for i in range(num_servers)])
    for width in (20, 40, 60, 80, 100, 120, 200):
        for height in (None, 12, 16, 24, 50):
            lines, alarms = render(shown, width, height)
            assert max(map(len, lines)) <= width
            if height is not None and not (width == 20 and height == 12):
                assert len(lines) <= height
            if width >= 40:
                assert len(alarms) == 1
                assert alarms[0].split()[0] == str(num_workers - 1)
                assert alarms[0].endswith("SLOW")


def test_hidden_workers_and_servers_are_counted():
    lines, _ = render(sample([worker(i) for i in range(100)]), 80, 24)
    assert sum("train_step" in line for line in lines) == 15
    assert "and 85 more workers: 255,000 done" in lines
    assert len(lines) == 24
    lines, _ = render(sample(servers=[server(i) for i in range(10)]), 80, 12)
    assert "and 8 more servers" in lines


def test_unknown_figures_are_dashes():
    unknown = ServerProgress(ServerFigures(0), None, None)
    shown = format_table(
        sample(
            [WorkerFigures(0, "idle")], [unknown], per_s=None, staleness={}, staleness_of_late=None
        ),
        100,
    )
    assert "6,000 done  -/s" in shown
    assert "staleness" not in shown
    assert shown.splitlines()[3].split() == ["0", "0", "-", "-"]
    assert shown.splitlines()[-1].split()[-1] == "silent"


def test_line_names_slow_workers_and_silent_servers():
    slow = worker(1, is_slow=True, running_s=8.0)
    line = format_line(sample([worker(0), slow], [server(0, state="silent", age_s=3.0)]))
    assert line == (
        "6,000 done, 400.0/s, 2 in flight, 250 waiting, 0 retries, staleness 1.0 (most 3), after "
        "2:13; worker 1 is slow (median 4.9 ms), runs 12346 train_step_of_the_model "
        "(train_the_model.py:112) for 8.0 s; server 0: silent for 3 s; server 0: in 954 MiB, out "
        "9.31 GiB"
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""), (0.00004, "0.0 ms"), (0.0049, "4.9 ms"), (0.0877, "88 ms"), (0.9994, "999 ms"),
        (0.9996, "1.0 s"), (59.94, "59.9 s"), (59.96, "1:00"), (83, "1:23"), (3700, "1:01:40"),
    ],
)  # fmt: skip
def test_format_duration(seconds, words):
    assert format_duration(seconds) == words
