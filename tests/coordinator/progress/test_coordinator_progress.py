"""Progress of a run: counts that add up, displays and files that never stop the run."""

import gc
import io
import json
import re
import sys
import threading
import time

import numpy as np
import optax
import pytest

import tpudist
from server_faults import Gate, check_sums, wait_until
from tpudist.coordinator.closure_tally import WorkerTally
from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.coordinator.progress import coordinator_progress, progress_display
from tpudist.coordinator.progress.progress_sample import is_slow, median_of_workers
from tpudist.engine.thread_engine import ThreadEngine
from tpudist.strategies.parameter_server import ParameterServerStrategy


class Run:
    """A strategy and its coordinator."""

    def __init__(self, seed=None, log=None, num_workers=2, num_servers=2, **options):
        self.engine = ThreadEngine(seed)
        self.strategy = ParameterServerStrategy(
            engine=self.engine, num_workers=num_workers, num_servers=num_servers, log=log
        )
        self.coordinator = ClusterCoordinator(self.strategy, **options)
        self.schedule, self.join = self.coordinator.schedule, self.coordinator.join

    def make(self, value, **options):
        with self.strategy.scope():
            return tpudist.Variable(value, **options)

    def sample(self):
        """Returns a sample to which all servers have contributed."""
        progress = self.coordinator.progress()
        while True:
            sample = progress.sample()
            if all(x.figures.state != "silent" for x in sample.servers):
                return sample

    def actor(self, worker):
        return self.coordinator._dispatcher._actors[worker]


@pytest.fixture
def start():
    runs = []
    before = set(threading.enumerate())

    def start(**options):
        runs.append(Run(**options))
        return runs[-1]

    yield start
    for run in runs:
        run.coordinator.shutdown()
    runs.clear()
    started = [x for x in threading.enumerate() if x not in before]
    assert [x.name for x in started if x.name.startswith("tpudist")] == []


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path)
    yield gate
    gate.open()


# Figures.


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [None, 0, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (1, 2, 3))],
)
def test_counts_of_every_sample_add_up_while_actors_die(start, tmp_path, seed):
    size, num_kills = 120, 12
    run = start(seed=seed, num_workers=3, log=tmp_path / "log")
    chance = np.random.default_rng(seed or 0)
    a, b = run.make(np.zeros(size)), run.make(np.zeros(size))

    def work(row):
        a.scatter_add(tpudist.IndexedSlices(np.ones(1), np.array([row])))
        b.assign_add(np.ones(size))
        return b.read_value()[row]

    def kill():
        queue = run.coordinator._queue
        for moment in np.sort(chance.integers(1, size - 10, num_kills)):
            with queue.changed:
                queue.changed.wait_for(lambda moment=moment: len(queue.finished) >= moment)
            workers = list(run.coordinator._dispatcher._actors.values())
            actors = [*run.strategy.servers.actors, *workers]
            run.engine.kill(actors[chance.integers(len(actors))], "for a test")

    lines = tmp_path / "progress.jsonl"
    progress = run.coordinator.progress(every_s=0.004, show=False, json_lines=lines)
    with progress:
        killer = run.engine.concurrency.start("killer", kill)
        for i in range(size):
            run.schedule(work, (i,))
            check_sums(progress.sample().as_json())
        assert run.join(timeout_s=120)
        assert killer.join(60)
    restarts = list(run.strategy.servers._incarnations)
    np.testing.assert_array_equal(b.numpy(), size)
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    for line in written:
        check_sums(line)
    for before, after in zip(written, written[1:], strict=False):
        assert before["done"] <= after["done"]
        for x, y in zip(before["servers"], after["servers"], strict=True):
            assert x["bytes_in"] <= y["bytes_in"]
            assert x["restarts"] <= y["restarts"]
    last = written[-1]
    assert last["done"] == last["finished"] == run.coordinator.num_finished == size
    assert last["in_flight"] == last["waiting"] == 0
    assert last["staleness"] == {str(k): v for k, v in run.coordinator.staleness.items()}
    assert set(last["retries"]) == {"worker died", "server died"}
    assert [x["restarts"] for x in last["servers"]] == restarts
    assert sum(restarts) + sum(x["restarts"] for x in last["workers"]) > num_kills / 2


def test_retries_are_counted_by_cause(start, tmp_path, gate, caplog):
    run = start(log=tmp_path / "log", num_workers=1, num_servers=1)
    v = run.make(0.0)

    def work():
        gate.come_here_once()
        v.assign_add(1.0)

    run.schedule(work)
    gate.wait_for(1)
    run.engine.kill(run.actor(0))
    run.join()
    run.engine.kill(run.strategy.servers.actors[0])
    run.schedule(work)
    run.join()
    sample = run.sample()
    assert sample.retries == {"server died": 1, "worker died": 1}
    assert sample.workers[0].retries == 2
    assert sample.workers[0].restarts == sample.servers[0].figures.restarts == 1


def test_a_closure_timeout_counts_as_too_late(start, gate, caplog):
    run = start(closure_timeout_s=0.1)
    run.schedule(gate.come_here_once)
    run.join()
    assert set(run.sample().retries) == {"too late"}


def test_errors_are_counted_by_type_with_the_closures_that_they_cancel(start, gate):
    run = start(num_workers=1)

    def fail():
        gate.wait_here()
        raise KeyError("here")

    run.schedule(fail)
    for _ in range(3):
        run.schedule(len, ("abc",))
    gate.open()
    with pytest.raises(KeyError):
        run.join()
    sample = run.sample()
    assert (sample.failed, sample.cancelled, sample.done) == (1, 3, 0)
    assert sample.errors == {"KeyError": 1}
    assert sample.finished == run.coordinator.num_finished == 4


def test_sample_shows_the_running_closure_and_its_duration(start, gate):
    run = start()
    run.schedule(gate.wait_here)
    [worker] = gate.wait_for(1)
    run.schedule(lambda: time.sleep(0)).fetch()
    runs, idle = run.sample().workers[worker], run.sample().workers[1 - worker]
    assert (runs.state, runs.closure) == ("runs", 0)
    assert runs.function.startswith("Gate.wait_here")
    assert runs.running_s > 0
    assert (idle.state, idle.closure, idle.done) == ("idle", None, 1)
    assert "0 Gate.wait_here" in str(run.coordinator.progress())


def test_rates_cover_the_time_since_an_earlier_sample(start):
    run = start(seed=0, num_workers=1)
    progress = run.coordinator.progress()
    assert progress.sample().per_s is None
    for _ in range(6):
        run.schedule(len, ("abc",))
    run.join()
    run.engine.concurrency.sleep(2.0)
    sample = progress.sample()
    assert sample.per_s == pytest.approx(3.0, rel=0.01)
    assert sample.workers[0].per_s == sample.per_s


def test_a_removed_worker_has_the_state_left(start):
    run = start()
    run.schedule(len, ("abc",)).fetch()
    done = {x.worker: x.done for x in run.sample().workers}
    [worker] = [x for x in done if done[x]]
    run.coordinator.remove_worker(worker)
    left = run.sample().workers[worker]
    assert (left.state, left.done) == ("left", 1)


def tally(*durations_s):
    made = WorkerTally()
    made.durations_s.extend(durations_s)
    return made


@pytest.mark.parametrize(
    ("durations_s", "running_s", "others_s", "slow"),
    [
        ([], None, [], False),
        ([], 100.0, [], False),  # nobody knows how long it takes
        ([], 3.1, [1.0] * 5, True),
        ([], 2.9, [1.0] * 5, False),
        ([], 0.9, [0.01] * 5, False),  # too short to matter
        ([4.0] * 5, None, [1.0] * 5, True),  # of two workers the other one is the measure
        ([2.9] * 5, None, [1.0] * 5, False),
        ([4.0] * 4, None, [1.0] * 5, False),  # the first ones compile
        ([1.0] * 5, None, [4.0] * 5, False),
    ],
)
def test_is_slow(durations_s, running_s, others_s, slow):
    worker, other = tally(*durations_s), tally(*others_s)
    assert is_slow(worker, running_s, median_of_workers([worker, other])) == slow


# What servers say.


@pytest.mark.slow
def test_servers_count_the_bytes_of_arrays(start):
    run = start(num_workers=1, num_servers=1)
    v = run.make(np.zeros((10, 5), np.float32))  # 200 bytes
    with run.strategy.scope():
        table = tpudist.ps.Table(4, tpudist.ps.rowwise_adagrad(0.1))
        optimizer = tpudist.Optimizer(optax.sgd(0.1))
    assert run.sample().servers[0].figures.bytes_in == 200
    run.schedule(lambda: v.read_value() + 1).fetch()
    assert run.sample().servers[0].figures.bytes_out == 200
    run.schedule(lambda: v.read_value() + 2).fetch()
    figures = run.sample().servers[0].figures
    assert (figures.bytes_in, figures.bytes_out) == (200, 200)  # nothing had changed
    run.schedule(lambda: v.assign_add(np.ones((10, 5), np.float32)))
    run.join()
    figures = run.sample().servers[0].figures
    assert (figures.bytes_in, figures.bytes_held) == (400, figures.bytes_held)
    run.schedule(lambda: optimizer.apply_gradients([(np.ones((10, 5), np.float32), v)]))
    run.join()
    assert run.sample().servers[0].figures.bytes_in == 600
    before = run.sample().servers[0].figures
    run.schedule(lambda: table.lookup(np.arange(3))).fetch()
    after = run.sample().servers[0].figures
    assert after.bytes_in - before.bytes_in == 3 * 8
    assert after.bytes_out - before.bytes_out == 3 * 4 * 4
    assert (after.rows, after.variables) == (3, 1)


def test_a_hanging_server_is_silent_and_delays_no_sample(start):
    run = start(num_workers=1)
    is_open, is_there = threading.Event(), threading.Event()

    def wait(x):
        is_there.set()
        is_open.wait(60)
        return x

    v, w = run.make(1.0, constraint=wait), run.make(1.0)
    with run.strategy.scope():
        optimizer = tpudist.Optimizer(optax.sgd(1.0))
    progress = run.coordinator.progress()

    def states():
        return [x.figures.state for x in progress.sample().servers]

    wait_until(lambda: states() == ["answers", "answers"], "two answers")
    run.schedule(lambda: optimizer.apply_gradients([(np.float32(1), v)]))
    try:
        assert is_there.wait(60)
        wait_until(lambda: states() == ["silent", "answers"], "one answer")
        figures = progress.sample().servers[0].figures
        assert figures.variables == 1  # as it has said before
        assert figures.age_s > 0
        assert re.search(r"silent for \d+ s", str(progress))
    finally:
        is_open.set()
    run.join()
    wait_until(lambda: states() == ["answers", "answers"], "two answers again")
    assert w.numpy() == 1


def test_a_dead_server_has_the_state_dead(start, caplog):
    run = start()
    v = run.make(1.0)
    run.engine.kill(run.strategy.servers.actors[0])
    assert [x.figures.state for x in run.sample().servers] == ["dead", "answers"]
    with pytest.raises(tpudist.errors.UnavailableError):
        v.numpy()


def test_a_starting_server_is_not_asked(start, monkeypatch):
    run = start()
    monkeypatch.setattr(run.strategy.servers, "_incarnations", [1, 0])
    assert [x.figures.state for x in run.sample().servers] == ["starts", "answers"]


# Where it is shown and written.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_redraws_the_table(start, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "20")
    run, terminal, out = start(), Terminal(), sys.stdout

    def read():
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
        return text.replace("\r", "\n")

    with run.coordinator.progress(every_s=0.02, file=terminal):
        wait_until(lambda: read().count("worker  done") > 1, "two tables")
        run.schedule(len, ("abc",))
        run.join()
    assert sys.stdout is out
    assert "\x1b[1A" in terminal.getvalue()  # the line before
    last = read()[read().rindex("1 done") :]
    assert "worker  done  per s" in last
    assert "server   in" in last
    assert last.endswith("\n")


def test_a_pipe_gets_a_line_at_intervals(start, capsys):
    run = start()
    with run.coordinator.progress(every_s=0.005):
        time.sleep(0.1)
        run.schedule(len, ("abc",))
        run.join()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("tpudist: 0 done, -/s")
    assert last.startswith("tpudist: 1 done")


def test_a_notebook_cell_redraws_the_table(start, monkeypatch):
    IPython = pytest.importorskip("IPython")
    shown = []

    class Handle:
        def update(self, page, raw):
            shown.append(page["text/plain"])

    monkeypatch.setattr(IPython.display, "display", lambda page, raw, display_id: Handle())
    monkeypatch.setattr(progress_display, "in_notebook", lambda: True)
    run = start()
    with run.coordinator.progress():
        run.schedule(len, ("abc",))
        run.join()
    assert shown[-1].startswith("1 done")
    assert "worker  done" in shown[-1]


def test_json_lines_continue_after_an_incomplete_line(start, tmp_path):
    run, path = start(), tmp_path / "new" / "progress.jsonl"
    for _ in range(2):
        with run.coordinator.progress(every_s=60, show=False, json_lines=path):
            pass
    with path.open("a") as file:
        file.write('{"time": 1')
    with run.coordinator.progress(every_s=60, show=False, json_lines=path):
        pass
    lines = path.read_text().splitlines()
    assert lines.pop(-3 if lines[-3].endswith("1") else -2) == '{"time": 1'
    assert all(json.loads(line)["finished"] == 0 for line in lines)


def test_tensorboard_events_contain_the_scalars(start, tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event  # type: ignore

    run = start()
    progress = run.coordinator.progress(every_s=0.01, show=False, tensorboard=tmp_path / "events")
    with progress:
        run.schedule(len, ("abc",)).fetch()
        wait_until(lambda: len(progress._sampler._earlier) > 1, "two samples")
    [file] = (tmp_path / "events").glob("events.out.tfevents.*")
    data, at, found = file.read_bytes(), 0, {}
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
    assert found["closures/done"] == (1, 1.0)
    assert found["worker_0/done"][1] + found["worker_1/done"][1] == 1.0
    assert {"closures/per_s", "server_1/bytes_in_per_s", "retries/all"} <= set(found)


def test_tensorboard_requires_tensorboardX(start, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = start()
    with pytest.raises(
        ModuleNotFoundError, match=r"tensorboard='runs/x'.*pip install tensorboardX"
    ):
        run.coordinator.progress(tensorboard="runs/x")


@pytest.mark.parametrize("every_s", [0, -1.0])
def test_every_s_must_be_positive(start, every_s):
    with pytest.raises(ValueError, match="every_s=.* seconds above 0"):
        start().coordinator.progress(every_s=every_s)


def test_a_display_can_be_entered_once(start):
    progress = start().coordinator.progress(show=False)
    with progress:
        pass
    with pytest.raises(RuntimeError, match="was already used"):
        progress.__enter__()


def test_a_failing_file_or_stream_warns_once_and_the_run_continues(start, tmp_path, caplog):
    pytest.importorskip("tensorboardX")
    run, closed, file = start(), io.StringIO(), tmp_path / "file"
    closed.close()
    file.touch()
    progress = run.coordinator.progress(
        every_s=0.005, file=closed, json_lines=tmp_path, tensorboard=file / "below"
    )
    with progress:
        time.sleep(0.05)
        assert run.schedule(len, ("abc",)).fetch() == 3
    failures = [x.getMessage() for x in caplog.records]
    assert len(failures) == 3, failures
    assert any(re.search("could not show the run.*closed file", x) for x in failures)
    assert any(f"could not write {tmp_path}. " in x and "IsADirectoryError" in x for x in failures)
    assert any(f"could not write events to {file / 'below'}" in x for x in failures)


def test_a_failing_sample_warns_once(start, caplog, monkeypatch):
    run = start()
    progress = run.coordinator.progress(every_s=0.005, show=False)
    monkeypatch.setattr(progress._sampler, "take", lambda timeout_s: 1 / 0)
    with progress:
        time.sleep(0.05)
    assert [x.getMessage() for x in caplog.records] == [
        "The progress display could not look at the run. The run continues without it: "
        "ZeroDivisionError: division by zero"
    ]


def test_a_failing_terminal_is_restored(start, caplog, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")

    class Broken(Terminal):
        def write(self, text):
            if "worker" in text:
                raise OSError("gone")
            return super().write(text)

    run, out = start(), sys.stdout
    with run.coordinator.progress(every_s=0.005, file=Broken()):
        time.sleep(0.05)
    assert sys.stdout is out
    assert [x.getMessage() for x in caplog.records] == [
        "The progress display could not show the run. The run continues without it: OSError: gone"
    ]


def test_a_hanging_sample_delays_the_end_only_for_a_while(start, caplog, monkeypatch):
    """A file system may hang, for example."""
    monkeypatch.setattr(coordinator_progress, "END_S", 0.05)
    run, is_open = start(), threading.Event()
    progress = run.coordinator.progress(every_s=0.01, show=False)
    take = progress._sampler.take
    monkeypatch.setattr(progress._sampler, "take", lambda wait_s: is_open.wait(60) and take(wait_s))
    with progress:
        pass
    is_open.set()
    assert progress._thread.join(60)
    assert [x.getMessage() for x in caplog.records] == [
        "The progress display could not end. The run continues without it: its last sample takes "
        "longer than 0.05 s"
    ]


# Its end.


def watchers():
    return [x for x in threading.enumerate() if x.name == "tpudist progress"]


def test_shutdown_of_the_coordinator_ends_the_display(start, tmp_path):
    before = set(watchers())
    run = start()
    progress = run.coordinator.progress(every_s=60, show=False, json_lines=tmp_path / "lines")
    progress.__enter__()
    run.schedule(len, ("abc",)).fetch()
    run.coordinator.shutdown()
    assert set(watchers()) <= before
    assert json.loads((tmp_path / "lines").read_text().splitlines()[-1])["done"] == 1
    progress.close()


def test_garbage_collection_of_the_coordinator_ends_the_display():
    before = set(watchers())
    run = Run()
    progress = run.coordinator.progress(every_s=60, show=False).__enter__()
    assert set(watchers()) - before
    del run
    gc.collect()
    wait_until(lambda: set(watchers()) <= before, "the end of the thread")
    del progress


def test_a_display_that_is_not_entered_starts_no_thread(start):
    before = set(watchers())
    run = start()
    run.coordinator.progress()
    run.schedule(len, ("abc",)).fetch()
    assert set(watchers()) <= before
