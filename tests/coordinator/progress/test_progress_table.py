"""What people see of a sample: on wide, narrow and low terminals, and as a line."""

import pytest

from tpudist.coordinator.progress.progress_sample import (
    ProgressSample,
    ServerProgress,
    WorkerFigures,
)
from tpudist.coordinator.progress.progress_table import (
    describe_sample,
    format_duration,
    table_lines,
)
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


def text(*args):
    return "\n".join(line.text for line in table_lines(*args))


def test_the_whole_table():
    workers = [worker(0), worker(1, is_slow=True, running_s=83, retries=1, restarts=1)]
    shown = sample(
        workers, retries={"worker died": 1, "too late": 2}, failed=1, errors={"KeyError": 1}
    )
    assert text(shown, 100) == (
        "6,000 done  400.0/s  2 in flight  250 waiting  3 retries (worker died 1, too late 2)\n"
        "1 failed (KeyError 1)  staleness 1.0 (most 3)  after 2:13\n"
        "\n"
        "worker   done  per s  median  retries  restarts  runs closure                      for\n"
        "     0  3,000  200.0  4.9 ms        0         0  12345 train_step_of_the_model  4.0 ms\n"
        "     1  3,000  200.0  4.9 ms        1         1  12346 train_step_of_the_model    1:23"
        "  SLOW\n"
        "\n"
        "server       in      in/s       out     out/s     holds  variables\n"
        "     0  954 MiB  9.54 MiB  9.31 GiB  19.1 MiB  95.4 MiB         31\n"
        "     1  954 MiB  9.54 MiB  9.31 GiB  19.1 MiB  95.4 MiB         31"
    )


def test_who_wants_to_be_seen_is_marked():
    workers = [worker(0), worker(1, is_slow=True), worker(2, state="starts", closure=None)]
    servers = [server(0), server(1, state="silent", age_s=12.0), server(2, state="starts")]
    lines = table_lines(sample(workers, servers), 120)
    assert [line.text.split()[0] for line in lines if line.kind == "alarm"] == ["1", "2", "1", "2"]
    assert [line.text[-15:] for line in lines if line.kind == "alarm"][2] == "silent for 12 s"


@pytest.mark.parametrize(("num_workers", "num_servers"), [(1, 1), (4, 2), (40, 9), (300, 2)])
def test_it_fits(num_workers, num_servers):
    """On terminals of every size; from 40 characters on, the slow worker is seen as well."""
    for width in (20, 40, 60, 80, 100, 120, 200):
        for height in (None, 12, 16, 24, 50):
            require_fit(width, height, num_workers, num_servers)


def require_fit(width, height, num_workers, num_servers):
    workers = [worker(i, is_slow=i == num_workers - 1, retries=i) for i in range(num_workers)]
    shown = sample(workers, [server(i, rows=i, restarts=i) for i in range(num_servers)])
    lines = table_lines(shown, width, height)
    assert max(len(line.text) for line in lines) <= width
    if height is not None and not (width == 20 and height == 12):
        assert len(lines) <= height
    if width >= 40:
        slow = [line.text for line in lines if line.kind == "alarm"]
        assert len(slow) == 1
        assert slow[0].split()[0] == str(num_workers - 1)
        assert slow[0].endswith("SLOW")


def test_workers_that_are_not_shown_are_counted():
    shown = text(sample([worker(i) for i in range(100)]), 80, 24)
    assert shown.count("train_step") == 15
    assert "and 85 more workers: 255,000 done" in shown
    assert len(shown.splitlines()) == 24
    assert "and 8 more servers" in text(sample(servers=[server(i) for i in range(10)]), 80, 12)


def test_what_nobody_knows_yet_is_a_dash():
    unknown = ServerProgress(ServerFigures(0), None, None)
    shown = text(
        sample(
            [WorkerFigures(0, "idle")], [unknown], per_s=None, staleness={}, staleness_of_late=None
        ),
        100,
    )
    assert "6,000 done  -/s" in shown
    assert "staleness" not in shown
    assert shown.splitlines()[3].split() == ["0", "0", "-", "-"]
    assert shown.splitlines()[-1].split()[-1] == "silent"


def test_a_line_names_who_is_slow_and_who_is_silent():
    slow = worker(1, is_slow=True, running_s=8.0)
    line = describe_sample(sample([worker(0), slow], [server(0, state="silent", age_s=3.0)]))
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
def test_durations(seconds, words):
    assert format_duration(seconds) == words
