"""Growth of agreements and of rounds about steps: messages, bytes, and CPU of process 0.

Simulated: the processes are threads, and the coordination service is a dict. The figures
count the CPU seconds of tpudist in process 0, without the service.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.counting_service import Run, exponent, run
from benchmarks.figures import Figure, at_most
from tpudist.input.feeds.batch import Batch
from tpudist.input.feeds.equal_batches import EqualWindows, ReadBatch
from tpudist.input.feeds.states_of_processes import PassStates
from tpudist.input.feeds.step_counts import ReplicaOrder
from tpudist.input.feeds.step_windows import Read, Windows
from tpudist.input.feeds.waiting_reads import MOST_AHEAD
from tpudist.input.process_rounds import Rounds
from tpudist.processes import process_agreement, process_watch
from tpudist.processes.process_agreement import Intention

SUITE = "agreements of more processes"
NUM_PROCESSES = (16, 64, 256, 1024)
_TEXT = "x" * 2000  # of a description: the shapes of a large model
_REPLICAS = 4  # of each process
_NUM_ROUNDS = 5
_LARGEST_EXPONENT = 1.2
_MOST_MS = 10.0
_PATIENCE = 100.0


def figures() -> Iterator[Figure]:
    """Requests, bytes and CPU milliseconds of one agreement, and of one round about 64 steps."""
    yield from _figures_of("agree on a program", _agree, 1)
    yield from _figures_of(f"agree on {MOST_AHEAD} steps", _take_windows, _NUM_ROUNDS)
    yield from _figures_of(f"compare {MOST_AHEAD} equal batches", _take_equal, _NUM_ROUNDS)


def _figures_of(
    subject: str, program: Callable[[int, int], object], num_rounds: int
) -> Iterator[Figure]:
    watch = SimpleNamespace(follow=lambda *_: None)  # no thread reports these processes
    with mock.patch.object(process_watch, "watch", return_value=watch):
        done = [_run(program, n) for n in NUM_PROCESSES]
    for n, found in zip(NUM_PROCESSES, done, strict=True):
        where = f"{n} processes {subject}"
        first, total = found.service.counts[0], found.service.total
        requests, size = first.requests / num_rounds, total.characters / num_rounds
        yield Figure(SUITE, where, "requests of process 0", requests, None)
        yield Figure(SUITE, where, "kB in all", size / 1e3, None)
        cpu_ms = 1e3 * found.cpu_s[0] / num_rounds
        figure = Figure(SUITE, where, "CPU ms of process 0", cpu_ms, None)
        yield at_most(figure, _MOST_MS) if n == NUM_PROCESSES[-1] else figure
    sizes = [x.service.total.characters for x in done]
    where = f"{NUM_PROCESSES[0]} to {NUM_PROCESSES[-1]} processes {subject}"
    growth = exponent(NUM_PROCESSES, sizes)
    yield at_most(Figure(SUITE, where, "exponent of the bytes", growth, None), _LARGEST_EXPONENT)


def _run(program: Callable[[int, int], object], num_processes: int) -> Run:
    done = run(num_processes, lambda process: program(num_processes, process), _PATIENCE)
    errors = [x for x in done.results if isinstance(x, Exception)]
    if errors:
        raise errors[0]
    return done


def _agree(num_processes: int, process: int) -> None:
    del process
    agreement = process_agreement._Agreement(tuple(range(num_processes)))
    agreement.agree(Intention("a run", {"values": _TEXT}))


def _take_windows(num_processes: int, process: int) -> int:
    """Takes the windows of steps that are read already."""
    mesh: Any = SimpleNamespace(
        processes=tuple(range(num_processes)),
        num_replicas=_REPLICAS * num_processes,
        devices_of=lambda replica: [SimpleNamespace(process_index=replica // _REPLICAS)],
    )
    row = np.zeros((1, 8), np.float32)
    batch = Batch([row], jax.tree.structure(0), 1)
    feed = SimpleNamespace(example=batch, drops_incomplete_steps=False)
    reads = (
        Read(
            [batch] * _REPLICAS,
            batch,
            [{"batches": i, "opened": 0, "checksum": hash((process, i))}],
        )
        for i in itertools.count()
    )
    rounds = Rounds(lambda: "pass", threading.Event(), mesh.processes)
    states = PassStates("pass", process, num_processes, 0)
    order = ReplicaOrder(mesh)
    windows = Windows(feed, order, next(reads), rounds, states, 0)
    windows.waiting.read_from(reads, lambda: 1, MOST_AHEAD)
    number, last = itertools.count(), None
    for window in itertools.islice(windows, _NUM_ROUNDS):
        for _ in window.rows:
            last = states.state_after(next(number), {})
    del last
    return next(number)


def _take_equal(num_processes: int, process: int) -> int:
    """Takes the windows of batches of an iterable that all processes have."""
    del process
    rounds = Rounds(lambda: "pass", threading.Event(), tuple(range(num_processes)))
    windows = EqualWindows(rounds, 0)
    read = ReadBatch(None, "8192 rows of uint8[rows,224,224,3], int32[rows]", 0)
    windows.waiting.read_from(itertools.repeat(read), lambda: 1, MOST_AHEAD)
    return sum(len(window.reads) for window in itertools.islice(windows, _NUM_ROUNDS))
