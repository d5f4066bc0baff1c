"""Steps of processes that have their own datasets, in many simulated processes."""

import itertools
import json
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.counting_service import exponent, run
from passes_ahead import check_that_threads_end, count_ahead
from tpudist import NumpyDataset
from tpudist.input.feeds import waiting_reads
from tpudist.input.feeds.per_replica_batches import WholeBatches
from tpudist.input.feeds.states_of_processes import PassStates
from tpudist.input.feeds.step_counts import ReplicaOrder
from tpudist.input.feeds.step_windows import Windows, read_steps
from tpudist.input.feeds.waiting_reads import MOST_AHEAD
from tpudist.input.iterator_state import Position
from tpudist.input.process_rounds import Rounds

REPLICAS = 2  # of each process
NAMES = itertools.count()


def mesh_of(num_processes, process):
    """Returns the part of a `ReplicaMesh` that feeds use."""
    first = REPLICAS * process
    return SimpleNamespace(
        processes=tuple(range(num_processes)),
        num_processes=num_processes,
        num_replicas=REPLICAS * num_processes,
        local_replicas=tuple(range(first, first + REPLICAS)),
        devices_of=lambda replica: [SimpleNamespace(process_index=replica // REPLICAS)],
    )


class Pass:
    """One pass of a simulated process; `name` is equal in all of them."""

    def __init__(self, num_processes, process, dataset, position=None, name="0", ahead=True):
        self.mesh = mesh_of(num_processes, process)
        self.feed = WholeBatches([dataset], self.mesh)
        self.stop = threading.Event()
        rounds = Rounds(lambda: name, self.stop, self.mesh.processes, reads_ahead=ahead)
        position = position or Position(0)
        self.parts = self.feed.host_parts(position, keep=True, rounds=rounds)

    def __iter__(self):
        for part, state in self.parts:
            rows = part.rows[REPLICAS * self.index() :][:REPLICAS]
            ids = [x[:n].tolist() for x, n in zip(part.leaves[0], rows, strict=True)]
            yield part.rows, ids, state

    def index(self):
        return self.mesh.local_replicas[0] // REPLICAS


def begin(process, dataset):
    return Pass(2, process, dataset).parts


def indexed(size, process=0):
    return NumpyDataset(np.arange(size) + 1000 * process).batch(2)


def listed(size, process=0):
    """The same batches, whose number is not known to the processes."""
    rows = np.arange(size) + 1000 * process
    return lambda: iter([rows[i : i + 2] for i in range(0, size, 2)])


def take_all(num_processes, make, patience=1, **options):
    """Returns the rows and ids of all steps in each process, and the run."""

    def program(process):
        elements = Pass(num_processes, process, make(process), **options)
        return [(rows, ids) for rows, ids, _ in elements]

    return run(num_processes, program, patience)


def requests_of_pass(num_processes, size, make):
    done = take_all(num_processes, lambda process: make(size, process), patience=100)
    steps = {len(x) for x in done.results}
    assert steps == {-(-size // (2 * REPLICAS))}
    return done.service.total


def test_steps_whose_number_is_known_need_no_message():
    """Their lengths are exchanged once per pass, however long it is."""
    short, long = (requests_of_pass(8, size, indexed) for size in (40, 4000))
    assert short.requests == long.requests
    assert long.characters < short.characters + 200


SIZES = (2, 16, 128, 1024)


def test_messages_of_a_pass_of_known_length_grow_with_the_processes():
    counts = [requests_of_pass(n, 16, indexed) for n in SIZES]
    assert exponent(SIZES, [x.requests for x in counts]) < 1.05
    assert exponent(SIZES, [x.characters for x in counts]) < 1.2


def windows_of(num_processes, process, size, num_taken):
    """Returns windows of a process whose steps are all read before they are requested."""
    mesh = mesh_of(num_processes, process)
    feed = WholeBatches([listed(size, process)], mesh)
    pairs = feed._begin(Position(0))
    reads = read_steps(feed, mesh, feed._steps([x for x, _ in pairs]), [x for _, x in pairs])
    rounds = Rounds(lambda: "pass", threading.Event(), mesh.processes)
    states = PassStates("pass", process, num_processes, 0)
    windows = Windows(feed, ReplicaOrder(mesh), next(reads), rounds, states, 0)
    windows.waiting.read_from(reads, lambda: 1, MOST_AHEAD)
    found = []
    for window in windows:
        for read in window.reads:
            num_taken.append(states.state_after(len(num_taken), {}))
            found.append(len(read.step))
    return found


def requests_of_windows(num_processes, num_steps):
    size = 2 * REPLICAS * num_steps
    done = run(num_processes, lambda i: len(windows_of(num_processes, i, size, [])), 100)
    assert done.results == [num_steps] * num_processes
    return done.service.total


def test_steps_of_unknown_number_need_one_round_per_64_steps():
    counts = [requests_of_windows(8, MOST_AHEAD * n).requests for n in (2, 3, 4, 5)]
    per_round = set(np.diff(counts).tolist())
    # Per process: positions, the announcement and the verdict. The first one also reads and cleans.
    assert max(per_round) <= 8 * 3 + 10


def test_messages_of_a_window_grow_with_the_processes():
    """If positions went to all processes, the bytes would grow with the square."""
    sizes = (16, 64, 256)
    counts = [requests_of_windows(n, 2 * MOST_AHEAD) for n in sizes]
    assert exponent(sizes, [x.requests for x in counts]) < 1.05
    assert exponent(sizes, [x.characters for x in counts]) < 1.3


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("make", [indexed, listed])
def test_all_processes_stop_at_the_same_step(make, ahead):
    """A process without more data feeds padding until the last one is at its end."""
    sizes = [0, 7, 301, 12]
    done = take_all(4, lambda process: make(sizes[process], process), ahead=ahead)
    assert {len(x) for x in done.results} == {76}
    rows = [[x for x, _ in result] for result in done.results]
    assert all(x == rows[0] for x in rows)
    assert rows[0][:2] == [(0, 0, 2, 2, 2, 2, 2, 2), (0, 0, 2, 1, 2, 2, 2, 2)]
    assert rows[0][-1] == (0, 0, 0, 0, 1, 0, 0, 0)
    for process, size in enumerate(sizes):
        ids = [x for _, step in done.results[process] for batch in step for x in batch]
        assert ids == list(range(1000 * process, 1000 * process + size))


@pytest.mark.parametrize("dataset", ["indexed", "listed"])
def test_every_position_resumes_bit_for_bit(dataset):
    make, sizes = globals()[dataset], [9, 23]

    def program(process):
        name = map("pass {}".format, itertools.count()).__next__
        elements = list(Pass(2, process, make(sizes[process], process), name=name()))
        found = []
        for step, (_, _, state) in enumerate(elements, 1):
            source = json.loads(json.dumps(state.read()))
            position = Position(0, step, source, resumed=True)
            again = Pass(2, process, make(sizes[process], process), position, name())
            later = [(rows, ids) for rows, ids, _ in again]
            found.append([source, later == [(rows, ids) for rows, ids, _ in elements[step:]]])
        return found

    results = run(2, program).results
    assert results[0] == results[1]  # every process reads the same state
    assert [is_equal for _, is_equal in results[0]] == [True] * 6


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_resume_with_other_replicas_reads_each_example_once(before, after, monkeypatch):
    """Replicas take batches in turn, so a step was another number of batches before."""
    size, num_steps = 48, 3

    def program(process, position=None):
        elements = Pass(2, process, indexed(size, process), position, name=str(REPLICAS))
        found = list(elements)
        return [ids for _, ids, _ in found], [state.read() for _, _, state in found]

    monkeypatch.setitem(globals(), "REPLICAS", before)
    first = run(2, program).results
    position = Position(0, num_steps, first[0][1][num_steps - 1], resumed=True)
    monkeypatch.setitem(globals(), "REPLICAS", after)
    later = run(2, lambda process: program(process, position)).results
    for process in range(2):
        steps = [*first[process][0][:num_steps], *later[process][0]]
        ids = [x for step in steps for batch in step for x in batch]
        assert ids == list(range(1000 * process, 1000 * process + size))
    assert f'"batches": {num_steps * before + after}' in json.dumps(later[0][1][0])


def test_positions_of_past_steps_are_removed():
    def program(process):
        taken = []
        for _, _, state in Pass(2, process, listed(4 * 600, process)):
            taken[:] = [state]
        return taken[0].read()["datasets"]

    done = run(2, program)
    assert done.results[0] == done.results[1]
    assert [x["batches"] for (x,) in done.results[0]] == [1200, 1200]
    assert len([key for key in done.service.texts if "/states/" in key]) <= 2 * 3


@pytest.mark.parametrize("make", [indexed, listed])
def test_texts_of_past_passes_are_removed(make):
    """Otherwise each epoch would leave some kilobytes for each process."""

    def program(process):
        first = Pass(2, process, make(40, process), name="data/0")
        kept = []
        for number in range(20):
            elements = Pass(2, process, make(40, process), name=f"data/{number}")
            elements.feed.open_passes = first.feed.open_passes
            states = [state for _, _, state in elements]
            kept += states[-1:] if number == 3 else []
            del states
        return kept[0].read()["datasets"]

    done = run(2, program)
    assert done.results == [[[{"batches": 20}]] * 2] * 2 or make is listed
    assert done.results[0] == done.results[1]
    assert {key.split("/")[2] for key in done.service.texts} == {"3", "19"}


def test_a_failing_dataset_is_named_in_all_processes_at_its_step():
    def failing(process):
        yield from [np.full(2, process)] * 200
        if process == 2:
            raise OSError("disk on fire")
        yield from [np.full(2, process)] * 200

    def program(process):
        num_steps = 0
        try:
            for _ in Pass(4, process, lambda: failing(process)):
                num_steps += 1
        except Exception as error:
            return num_steps, type(error).__name__, str(error)

    results = run(4, program).results
    assert results.pop(2) == (100, "OSError", "disk on fire")
    for steps, kind, text in results:
        assert (steps, kind) == (100, "RuntimeError")
        assert text.startswith("The dataset of process 2 failed at step 100. The other processes")
        assert text.endswith("OSError: disk on fire")


def test_batches_of_other_shapes_are_an_error_in_all_processes_at_their_step():
    def program(process):
        batches = [np.zeros((1, 3))] * 20 + [np.zeros((1, 3 + process))] * 20
        found = Pass(2, process, batches)
        num_steps = 0
        try:
            for _ in found.parts:
                num_steps += 1
        except ValueError as error:
            return num_steps, str(error)

    first, second = run(2, program).results
    assert first == second
    assert first[0] == 10
    assert "float64[rows,3], process 1" in first[1] or "float32[rows,3], process 1" in first[1]


def test_a_process_that_leaves_is_named_in_the_others():
    def program(process):
        elements = Pass(3, process, listed(4 * 1000))
        try:
            for number, _ in enumerate(elements):
                if process == 1 and number == 70:
                    elements.stop.set()
                    elements.parts.close()
                    return None
        except RuntimeError as error:
            return str(error)

    first, none, second = run(3, program).results
    assert none is None
    # One of the others may have left for that reason before the last one looks.
    assert all(re.search(r"process(es)? (0, )?1(, 2)? left and", x) for x in (first, second))


def test_a_process_without_batches_pads_with_a_row_of_another_one():
    """Also after its end, when the others continue with batches of other shapes."""

    def program(process):
        batches = [np.full((2, 3), 5.0)] * 4 + [np.full((2, 7), 6.0)] * 4
        parts = Pass(3, process, [batches, [], batches[:2]][process]).parts
        return [(x.leaves[0].shape, float(x.leaves[0].min())) for x, _ in parts]

    results = run(3, program).results
    assert results == [[((2, 2, 3), 5.0)] * 2 + [((2, 2, 7), 6.0)] * 2] * 3


def test_large_batches_are_not_read_ahead(monkeypatch):
    """Reading ahead may take a limited number of bytes."""
    monkeypatch.setattr(waiting_reads, "_MOST_BYTES_AHEAD", 100)
    assert count_ahead(begin, [100] * 100, REPLICAS) == [0, 0]


def test_later_steps_may_be_larger_than_the_first(monkeypatch):
    """The limit is of bytes, and not of as many steps as the first one allows."""
    monkeypatch.setattr(waiting_reads, "_MOST_BYTES_AHEAD", 4 * REPLICAS * 800)  # 4 large steps
    most = count_ahead(begin, [1] * REPLICAS + [100] * (200 - REPLICAS), REPLICAS)
    # Four places have up to one step more, and another step is being read.
    assert max(most) <= (4 * 5 + 1) * REPLICAS


def test_the_bytes_that_are_read_ahead_have_a_limit(monkeypatch):
    """Also in a process whose steps wait for a slower one."""
    monkeypatch.setattr(waiting_reads, "_MOST_BYTES_AHEAD", 4 * REPLICAS * 800)  # 4 steps
    most = count_ahead(begin, [100] * 200, REPLICAS, delay_s=0.001)
    # The four places are full, and another step is being read.
    assert max(most) <= (4 * 4 + 1) * REPLICAS


def test_a_pass_that_is_closed_ends_its_threads():
    check_that_threads_end(lambda process: Pass(2, process, listed(4 * 1000)))
