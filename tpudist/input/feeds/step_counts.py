"""Rows of every replica in every step, computed without messages.

That is possible if all processes read their data by number: then the lengths of the datasets, which
the processes exchange once per pass, determine the rows of every step and every position.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tpudist.input.iterator_state import State
from tpudist.input.sources.indexed_dataset import INFINITE_CARDINALITY, IndexedDataset
from tpudist.xla.mesh import ReplicaMesh


class Length(NamedTuple):
    """The batches of a dataset that is read by number.

    Attributes:
        num_batches: Number of batches in a pass; -1 for no end.
        batches_of_epoch: Number of batches in an epoch.
        rows: Rows of a batch; 1 for an element that is not a batch.
        last_rows: Rows of the last batch of an epoch.
    """

    num_batches: int
    batches_of_epoch: int
    rows: int
    last_rows: int

    def rows_of(self, batch: int) -> int:
        """Returns the rows of a batch of the pass; 0 after its end."""
        if self.num_batches != INFINITE_CARDINALITY and batch >= self.num_batches:
            return 0
        is_last = batch % self.batches_of_epoch == self.batches_of_epoch - 1
        return self.last_rows if is_last else self.rows

    def count_taken(self, num_requested: int) -> int:
        """Returns how many of `num_requested` batches a pass has."""
        has_end = self.num_batches != INFINITE_CARDINALITY
        return min(num_requested, self.num_batches) if has_end else num_requested


def length_of(dataset: IndexedDataset) -> Length:
    """Returns the length of a dataset."""
    numbers, size = dataset.batches_of_epoch, dataset.global_batch_size or 1
    last_rows = min(size, dataset.num_examples - numbers[-1] * size) if numbers else 0
    return Length(dataset.cardinality, len(numbers), size, last_rows)


class ProcessLengths(NamedTuple):
    """The lengths of the datasets of one process: one per replica, or one for all in turn.

    Attributes:
        lengths: Length of each dataset.
        num_replicas: Number of replicas of the process.
    """

    lengths: Sequence[Length]
    num_replicas: int

    def rows(self, step: int) -> tuple[int, ...]:
        """Returns the rows of each replica of the process."""
        if len(self.lengths) == self.num_replicas:
            return tuple(length.rows_of(step) for length in self.lengths)
        first = step * self.num_replicas
        (length,) = self.lengths
        return tuple(length.rows_of(first + i) for i in range(self.num_replicas))

    def states(self, num_steps: int) -> list[State]:
        """Returns the positions of the datasets after that many steps."""
        in_turn = len(self.lengths) < self.num_replicas
        num_batches = num_steps * self.num_replicas if in_turn else num_steps
        return [{"batches": length.count_taken(num_batches)} for length in self.lengths]


class ReplicaOrder:
    """The places of all replicas: the process of each, and its number in that process."""

    def __init__(self, mesh: ReplicaMesh):
        position = {process: i for i, process in enumerate(mesh.processes)}
        seen = [0] * len(position)
        self._places: list[tuple[int, int]] = []
        for replica in range(mesh.num_replicas):
            owner = position[mesh.devices_of(replica)[0].process_index]
            self._places.append((owner, seen[owner]))
            seen[owner] += 1
        self._num_replicas = seen

    def count_replicas(self, process: int) -> int:
        """Returns the number of replicas of the process at this position."""
        return self._num_replicas[process]

    def order(self, rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Returns the rows of each process's replicas in the order of all replicas."""
        return tuple(rows[process][number] for process, number in self._places)


class StepCounts:
    """The rows of all replicas in each step, and the positions after it.

    Args:
        order: The places of all replicas.
        processes: The lengths of each process. Equal ones are one object.
    """

    def __init__(self, order: ReplicaOrder, processes: Sequence[ProcessLengths]):
        self._order = order
        self._processes = processes
        self._kinds = {id(x): x for x in processes}
        # Steps of full batches have the same rows, so they are put in order once.
        self._last: tuple[dict[int, tuple[int, ...]], tuple[int, ...]] = ({}, ())

    def rows(self, step: int) -> tuple[int, ...]:
        """Returns the rows of each replica in a step."""
        rows = {key: kind.rows(step) for key, kind in self._kinds.items()}
        if rows != self._last[0]:
            self._last = rows, self._order.order([rows[id(x)] for x in self._processes])
        return self._last[1]

    def rows_of_process(self, process: int, step: int) -> tuple[int, ...]:
        """Returns the rows of each replica of one process, at this position, in a step."""
        return self._processes[process].rows(step)

    def states(self, num_steps: int) -> list[list[State]]:
        """Returns the positions of every process's datasets after that many steps."""
        states = {key: kind.states(num_steps) for key, kind in self._kinds.items()}
        return [states[id(x)] for x in self._processes]
