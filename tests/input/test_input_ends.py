"""After any end of a pass nothing remains: no thread, no memory, no lost error."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref

import jax
import numpy as np
import pytest

from places import ROOT
from tpudist import InputOptions, MirroredStrategy, NumpyDataset
from tpudist.input import IndexedDataset


@pytest.fixture(scope="module")
def two():
    return MirroredStrategy(jax.devices()[:2])


_of_others = set()


@pytest.fixture(autouse=True)
def nothing_of_other_tests():
    """Other tests in this process may still have an iterator, and its thread."""
    _of_others.clear()
    _of_others.update(thread.ident for thread in threading.enumerate())


def _threads():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "tpudist-prefetch" and thread.ident not in _of_others
    ]


def _wait_until(condition, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.005)


class Broken(IndexedDataset):
    """Examples that include one unreadable example."""

    def __init__(self):
        self._num_rows = 40
        self._treedef = jax.tree.structure(0)
        self._leaf_specs = [jax.ShapeDtypeStruct((), np.int32)]

    def _read(self, rows, epoch):
        if 20 in rows:
            raise OSError("sector 20 is bad")
        return [rows.astype(np.int32)]


def broken_loader():
    for i in range(10):
        if i == 5:
            raise OSError("sector 20 is bad")
        yield np.arange(4) + 4 * i


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4])
@pytest.mark.parametrize("source", [Broken().batch(4), broken_loader], ids=["indexed", "iterable"])
def test_an_error_of_the_source_is_raised_at_its_step(two, source, size, fetch):
    """The error happened steps before, in another thread; it has the traceback of the source."""
    options = InputOptions(fetch, experimental_per_replica_buffer_size=size)
    iterator = iter(two.experimental_distribute_dataset(source, options))
    for _ in range(5):
        next(iterator)
    state = iterator.get_state()
    with pytest.raises(OSError, match="sector 20 is bad") as caught:
        next(iterator)
    told = "".join(traceback.format_tb(caught.value.__traceback__))
    assert "broken_loader" in told or "_read" in told
    assert iterator.get_state() == state  # the failed element was not returned
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("how", ["break", "exception", "close", "set_state", "dropped", "end"])
@pytest.mark.parametrize("fetch", [True, False])
def test_no_thread_is_left(two, how, fetch):
    assert not _threads()
    dataset = NumpyDataset(np.arange(64)).batch(8)
    options = InputOptions(fetch, experimental_per_replica_buffer_size=2)
    dataset = two.experimental_distribute_dataset(dataset, options)
    iterator = iter(dataset)
    state = iterator.get_state()
    assert not _threads()  # nothing is read before the first request
    if how == "break":
        for _ in dataset:
            break
    elif how == "exception":
        with contextlib.suppress(ZeroDivisionError):
            for _ in dataset:
                raise ZeroDivisionError
    elif how == "end":
        assert len(list(iterator)) == 8
    else:
        next(iterator)
        if how == "close":
            iterator.close()
        elif how == "set_state":
            iterator.set_state(state)
        assert how == "dropped" or not _threads()
    del iterator
    gc.collect()
    _wait_until(lambda: not _threads())


class Noted(IndexedDataset):
    """Examples that count the batches in memory."""

    def __init__(self):
        self._num_rows = 400
        self._treedef = jax.tree.structure(0)
        self._leaf_specs = [jax.ShapeDtypeStruct((8,), np.float32)]
        self._in_memory = {"now": 0, "most": 0}  # shared with what `batch` returns

    @property
    def alive(self):
        return self._in_memory["now"]

    @property
    def most(self):
        return self._in_memory["most"]

    def _read(self, rows, epoch):
        return [self.note(np.zeros((*rows.shape, 8), np.float32))]

    def note(self, array):
        self._in_memory["now"] += 1
        self._in_memory["most"] = max(self.most, self.alive)
        weakref.finalize(array, self._forget)
        return array

    def _forget(self):
        self._in_memory["now"] -= 1


@pytest.mark.parametrize("is_iterable", [False, True])
@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4])
def test_memory_is_bounded_by_the_buffer(two, size, fetch, is_iterable):
    """Only ready batches, the batch in preparation, and the batch in the loop are in memory."""
    noted = Noted()

    def loader():
        return (noted.note(np.zeros((8, 8), np.float32)) for _ in range(50))

    source = loader if is_iterable else noted.batch(8)
    options = InputOptions(fetch, experimental_per_replica_buffer_size=size)
    for element in two.experimental_distribute_dataset(source, options):
        assert element.shape == (4, 8)
        time.sleep(0.001)
    del element  # on CPU it is the same memory
    assert noted.most <= size + 3  # one more: JAX releases host memory a little later
    _wait_until(lambda: gc.collect() is not None and noted.alive == 0)


PROGRAM = """
import gc, itertools, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell began with &
import numpy as np
import tpudist
tpudist.emulate(2)
strategy = tpudist.MirroredStrategy()

def endless():
    yield np.zeros(4)
    time.sleep({sleep})
    while True:
        yield np.zeros(4)

source = {source}
options = tpudist.InputOptions({fetch}, experimental_per_replica_buffer_size={size})
iterator = iter(strategy.experimental_distribute_dataset(source, options))
gc.callbacks.clear()  # Python ignores exceptions in a callback, Ctrl-C included; JAX adds one

def loop():  # in a `try` itself, CPython would not cover the jump back of a loop that ends in `if`
    for i in itertools.count():
        next(iterator)
        if i == 0:
            print("waiting", flush=True)

try:
    loop()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("source", "sleep", "size", "fetch"),
    [
        ("endless", 1000, 2, True),  # the loop waits for an element that does not come
        pytest.param(*("endless", 0, 1, False), marks=pytest.mark.exhaustive),  # both are busy
        pytest.param(
            *("tpudist.NumpyDataset(np.arange(64)).shuffle(0).batch(8).repeat()", 0, 2, True),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_ctrl_c_ends_the_process_at_once(source, sleep, size, fetch):
    program = PROGRAM.format(source=source, sleep=sleep, size=size, fetch=fetch)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.2)
            sent_s = time.monotonic()
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert time.monotonic() - sent_s < 25  # a thread gets 2 s to finish its work
    assert output == "interrupted\n", errors
    assert "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT
    assert "Fatal" not in errors
