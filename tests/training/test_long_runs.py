"""The memory of a process for past steps is constant from 10,000 to 100,000 steps."""

import collections
import gc
import io
import itertools
import tracemalloc
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from tpudist import step_boundaries
from tpudist.goodput import goodput
from tpudist.processes.run_order import RunOrder
from tpudist.run.dispatch.throttle import Throttle
from tpudist.training import history
from tpudist.training.history import History
from tpudist.xla import compile_log

FEW, MANY = 10_000, 100_000
SLACK_BYTES = 3000  # numbers become longer


def _growth(step: Callable[[int], object]) -> int:
    """Bytes that Python objects need more after `MANY` steps than after `FEW`."""
    for number in range(FEW):
        step(number)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(FEW, FEW + 1000):  # so that what each step replaces is traced, too
            step(number)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(FEW + 1000, MANY):
            step(number)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def _runs(monkeypatch) -> Callable[[int], object]:
    order = RunOrder()

    def step(number: int) -> None:
        order.add(number % 3)
        order.last_runs() if number % 100 == 0 else None

    return step


def _boundaries(monkeypatch) -> Callable[[int], object]:
    class Batches:
        pass

    training, kept = Batches(), []

    def step(number: int) -> None:
        step_boundaries.poll(training)
        if number % 1000 == 0:  # an evaluation, with an iterator of its own
            kept[:] = [Batches()]
            for _ in range(3):
                step_boundaries.poll(kept[0])

    return step


def _goodput(monkeypatch) -> Callable[[int], object]:
    class Nowhere(io.StringIO):
        def write(self, _: str) -> int:
            return 0

    recorder = goodput._Recorder(Nowhere(), 0, 1)
    monkeypatch.setattr(recorder, "note", lambda *_, **__: None)
    recorder._closing.set()  # the thread that writes; this one counts alone
    recorder._thread.join()

    def step(number: int) -> None:
        recorder.enter(goodput.Phase.INPUT)
        recorder.leave()
        recorder.begin_call()

    return step


def _throttle(monkeypatch) -> Callable[[int], object]:
    throttle, array = Throttle(jax.devices()[:2]), jnp.ones(2)

    def step(number: int) -> None:
        throttle.before_step([])
        throttle.after_step(array)

    return step


def _compiles(monkeypatch) -> Callable[[int], object]:
    monkeypatch.setattr(compile_log, "_records", collections.deque(maxlen=1000))
    monkeypatch.setattr(compile_log._log, "log", lambda *_: None)
    return lambda number: compile_log.record_compile("f", f"{number:06}", 1.0, 1, {})


@pytest.mark.parametrize("make", [_runs, _boundaries, _goodput, _throttle, _compiles])
def test_bookkeeping_of_steps_takes_constant_memory(monkeypatch, make):
    assert _growth(make(monkeypatch)) < SLACK_BYTES


def test_listeners_of_deleted_objects_are_forgotten():
    """A program may create a checkpoint manager for each save."""

    class Manager:
        def warn(self) -> None:
            pass

    before = len(step_boundaries._listeners)
    for _ in range(100):
        step_boundaries.register(Manager().warn)
    assert len(step_boundaries._listeners) <= before + 1


def test_a_history_keeps_the_last_steps_and_the_sums_of_all(monkeypatch):
    monkeypatch.setattr(history, "MAX_KEPT", 500)
    found = History(seconds=[9.0] * 700, num_earlier_seconds=700, total_s=4000.0, waited_s=100.0)
    sizes = set()
    for number in range(1, 10_001):
        found.add({"loss": float(number)})
        found.add_seconds(0.25)
        sizes |= {len(found.losses), len(found.seconds)}
    assert max(sizes) < 1000
    assert found.losses == [float(x) for x in range(found.first_step, 10_001)]
    assert len(found.losses) >= 500
    assert found.num_earlier_seconds == 0
    assert (found.mean_step_s, found.median_step_s) == (0.25, 0.25)
    assert found.goodput == (10_000 * 0.25 - 100) / 4000
    assert found.waited_share == 100 / 2500


def test_a_pass_of_a_billion_batches_is_read_at_its_ends_only():
    """No list of batches, and no number of 32 bits."""
    num_batches = 10**9
    rows = np.broadcast_to(np.float32(1), (3 * num_batches,))  # of one element in memory
    strategy = tpudist.OneDeviceStrategy()
    tracemalloc.start()
    try:
        dataset = tpudist.NumpyDataset({"x": rows}).shuffle(seed=0).batch(3)
        data = strategy.experimental_distribute_dataset(dataset)
        iterator = iter(data)
        next(iterator)
        state = iterator.get_state()
        assert state["step"] == 1
        state["step"], state["source"] = num_batches - 2, {"batches": num_batches - 2}
        iterator.set_state(state)
        assert sum(1 for _ in itertools.islice(iterator, 5)) == 2
        assert iterator.get_state()["step"] in (0, num_batches)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()
