"""Batches of an iterable that all processes have, in many simulated processes."""

import itertools
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.counting_service import exponent, run
from passes_ahead import check_that_threads_end, count_ahead
from tpudist.input.feeds import waiting_reads
from tpudist.input.feeds.equal_batches import EqualWindows, _compare
from tpudist.input.feeds.split_batches import SplitBatches
from tpudist.input.feeds.waiting_reads import MOST_AHEAD
from tpudist.input.iterator_state import Position
from tpudist.input.process_rounds import Rounds
from tpudist.input.sources import adapt
from tpudist.options import PartialBatch

ROWS = 4  # of a batch; each process has one replica


class Mesh(SimpleNamespace):
    """The part of a `ReplicaMesh` that the feed uses."""

    __hash__ = object.__hash__


class Pass:
    """One pass of a simulated process."""

    def __init__(self, num_processes, process, dataset, ahead=True, platform="cpu", **options):
        self.mesh = Mesh(
            processes=tuple(range(num_processes)),
            num_processes=num_processes,
            num_replicas=num_processes,
            local_replicas=(process,),
            platform=platform,
        )
        position = options.pop("position", Position(0))
        self.feed = SplitBatches(adapt.to_source(dataset), self.mesh, options.pop("partial", None))
        self.stop = threading.Event()
        name = options.pop("name", "pass")
        rounds = Rounds(lambda: name, self.stop, self.mesh.processes, reads_ahead=ahead)
        self.parts = self.feed.host_parts(position, keep=False, rounds=rounds)

    def __iter__(self):
        for part, state in self.parts:
            yield part.rows, part.leaves[0].reshape(-1).tolist(), state


def batches(number, num_processes, last=None):
    size = ROWS * num_processes
    for i in range(number):
        yield np.arange(size if last is None or i < number - 1 else last) + size * i


def take_all(num_processes, number, **options):
    def program(process):
        found = Pass(num_processes, process, lambda: batches(number, num_processes), **options)
        return list(found)

    return run(num_processes, program, 100)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_each_process_takes_its_rows_and_has_the_states_of_one_round_per_batch(num_processes):
    ahead, in_turn = (take_all(num_processes, 150, ahead=x).results for x in (True, False))
    assert ahead == in_turn
    first = ROWS * (num_processes * 149 + 1)
    assert ahead[1][149][1] == list(range(first, first + ROWS))
    assert [x[149][2] for x in ahead] == [ahead[0][149][2]] * num_processes


@pytest.mark.parametrize("partial", list(PartialBatch))
def test_a_partial_batch_is_treated_as_without_other_processes(partial):
    def program(process):
        found = []
        try:
            last = lambda: batches(70, 2, last=3)  # noqa: E731
            found += Pass(2, process, last, partial=partial)
        except ValueError as error:
            found.append(str(error))
        return found

    results = run(2, program, 100).results
    rows = [[x[0] for x in result if not isinstance(x, str)] for result in results]
    assert rows[0] == rows[1]
    assert rows[0][:69] == [(ROWS, ROWS)] * 69
    assert rows[0][69:] == ([(2, 1)] if partial.value in ("pad", "shrink") else [])
    if partial is PartialBatch.ERROR:
        assert "Batch 69 of the dataset has 3 rows, fewer than" in results[0][-1]


def requests_of_rounds(num_processes, num_rounds):
    """Returns the counts of rounds about batches that are all read before they are requested."""

    def program(process):
        found = Pass(num_processes, process, lambda: batches(MOST_AHEAD * num_rounds, 1))
        source = found.feed.source.begin(0)
        checked = found.feed._check_batches(source, 0)
        read = (found.feed._describe(batch, None) for batch, _ in checked)
        windows = EqualWindows(Rounds(lambda: "a", found.stop, found.mesh.processes), 0)
        windows.waiting.read_from(read, lambda: 1, MOST_AHEAD)
        return [len(x.reads) for x in itertools.islice(windows, num_rounds)]

    done = run(num_processes, program, 100)
    assert done.results == [[MOST_AHEAD] * num_rounds] * num_processes
    return done.service.total


def test_64_batches_need_one_round():
    counts = [requests_of_rounds(8, n).requests for n in (2, 3, 4)]
    # Per process: the announcement and the answer. The first one also reads each, and cleans.
    assert max(np.diff(counts)) <= 8 * 3


def test_messages_of_a_round_grow_with_the_processes():
    sizes = (16, 64, 256)
    counts = [requests_of_rounds(n, 2) for n in sizes]
    assert exponent(sizes, [x.requests for x in counts]) < 1.05
    # The first process reads all texts about log4(n) times, depending on who arrives when.
    assert exponent(sizes, [x.characters for x in counts]) < 1.3


def fail_in_step(make, num_processes=3, **options):
    """Returns the number of steps of each process, and its error."""

    def program(process):
        num_steps = 0
        try:
            for _ in Pass(num_processes, process, make(process), **options):
                num_steps += 1
        except Exception as error:
            return num_steps, type(error).__name__, str(error)

    return run(num_processes, program).results


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    ("other", "text"),
    [
        ([np.zeros((6, 2))], "process 1: 6 rows of float32[rows,2]"),
        ([np.zeros((12, 3))], "process 1: 12 rows of float32[rows,3]"),
        ([], "process 1: no more batch"),
    ],
)
def test_a_batch_that_differs_is_an_error_in_all_processes_at_its_step(other, text, ahead):
    same = [np.zeros((12, 2))] * 100
    results = fail_in_step(lambda i: [*same, *(other if i == 1 else same)], ahead=ahead)
    assert {x[:2] for x in results} == {(100, "ValueError")}
    assert len({x[2] for x in results}) == 1
    message = results[0][2]
    assert message.startswith("The processes differ in batch 100 of the dataset: processes 0, 2: ")
    assert text in message
    assert "12 rows of float32[rows,2]" in message


@pytest.mark.parametrize("ahead", [True, False])
def test_an_iterable_that_fails_is_named_in_all_processes_at_its_step(ahead):
    def failing(process):
        yield from [np.zeros(12)] * 100
        if process == 2:
            raise OSError("disk on fire")
        yield from [np.zeros(12)] * 100

    results = fail_in_step(lambda process: lambda: failing(process), ahead=ahead)
    assert results.pop(2) == (100, "OSError", "disk on fire")
    for steps, kind, text in results:
        assert (steps, kind) == (100, "RuntimeError")
        assert text.startswith("The dataset of process 2 failed at step 100. The other processes")
        assert text.endswith("OSError: disk on fire")


def test_a_loader_may_use_its_memory_again():
    """Also where a batch is borrowed until it is on the devices, as on TPUs."""

    def loader():
        array = np.empty(8)
        for i in range(150):
            array[:] = i
            yield array

    def program(process):
        return [ids for _, ids, _ in Pass(2, process, loader, platform="tpu")]

    assert run(2, program).results == [[[i] * 4 for i in range(150)]] * 2


def test_large_batches_are_not_read_ahead(monkeypatch):
    monkeypatch.setattr(waiting_reads, "_MOST_BYTES_AHEAD", 100)
    assert count_ahead(lambda i, dataset: Pass(2, i, dataset).parts, [100] * 50) == [0, 0]


def test_a_pass_resumes_from_each_position():
    def program(process):
        name = map("pass {}".format, itertools.count()).__next__
        make = lambda: batches(6, 2)  # noqa: E731
        elements = list(Pass(2, process, make, name=name()))
        found = []
        for step, (_, _, state) in enumerate(elements, 1):
            position = Position(0, step, json.loads(json.dumps(state)), resumed=True)
            later = [x[:2] for x in Pass(2, process, make, position=position, name=name())]
            found.append(later == [x[:2] for x in elements[step:]])
        return found

    assert run(2, program).results == [[True] * 6] * 2


def test_a_pass_that_is_closed_ends_its_threads():
    check_that_threads_end(lambda process: Pass(2, process, lambda: batches(1000, 2)))


def test_texts_of_thousands_of_processes_are_short():
    equal = {"runs": [[3, "8 rows"]], "failure": ""}
    other = {"runs": [[2, "8 rows"], [1, "no more batch"]], "failure": ""}
    failed = {"runs": [], "failure": "OSError: a"}
    messages = [other if i in (17, 402) else equal for i in range(4096)]
    assert _compare(range(4096), messages) == {"num_batches": 2, "failures": [], "different": ""}
    for message, runs in ((equal, [[1, "8 rows"]]), (other, [[1, "no more batch"]])):
        message["runs"] = runs
    assert _compare(range(4096), messages)["different"] == (
        "processes 0-4095 but 17, 402: 8 rows; processes 17, 402: no more batch"
    )
    messages[5] = failed
    assert _compare(range(4096), messages)["failures"] == [(5, "OSError: a")]
