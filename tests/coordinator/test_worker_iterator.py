"""The iterator of a worker, and the position at which its successor begins."""

import numpy as np
import pytest

from tpudist import NumpyDataset
from tpudist.coordinator.worker_iterator import WorkerIterator
from tpudist.input import from_records


class Numbers:
    """Records that count how often they are read."""

    num_reads = 0

    def __len__(self):
        return 10**10

    def __getitem__(self, number):
        Numbers.num_reads += 1
        return np.int64(number)


@pytest.mark.parametrize("position", [0, 3, 5, 8])
@pytest.mark.parametrize(
    "make",
    [
        lambda: NumpyDataset(np.arange(20)).shuffle(3).batch(4).repeat(2),
        lambda: list(np.arange(40).reshape(10, 4)),
    ],
)
def test_a_successor_continues_after_the_consumed_elements(make, position):
    iterator = WorkerIterator(make)
    for _ in range(position):
        next(iterator)
    iterator.commit()
    successor = WorkerIterator(make)
    successor.go_to(iterator.position)
    assert successor.position == position
    assert [x.tolist() for x in successor] == [x.tolist() for x in iterator]


def test_a_dataset_that_began_a_pass_starts_at_its_first_one():
    data = NumpyDataset(np.arange(20)).shuffle(3).batch(20)
    (first,) = data
    assert next(WorkerIterator(lambda: data)).tolist() == first.tolist()


def test_a_successor_does_not_read_the_consumed_examples_of_indexed_data():
    """It took as long as the lost worker had taken."""
    iterator = WorkerIterator(lambda: from_records(Numbers()).shuffle(0).batch(4))
    before = Numbers.num_reads
    iterator.go_to(10**9)
    assert len(next(iterator)) == 4
    assert Numbers.num_reads == before + 4


@pytest.mark.parametrize("make", [lambda: NumpyDataset(np.arange(8)).batch(4), lambda: iter("ab")])
def test_a_successor_with_fewer_elements_raises(make):
    with pytest.raises(ValueError, match="consumed 3 elements of its dataset, but .* has only 2"):
        WorkerIterator(make).go_to(3)
    WorkerIterator(make).go_to(2)
