"""The global batch of each step: a function of (seed, step, batch size) and of nothing else.

Not on the number of replicas or processes, nor on the steps before: the same training on every
mesh, and a run that resumes at step k needs no state but k, which is what the state of an iterator
is. A strategy's `experimental_distribute_dataset` gives each replica its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

Batch = dict[str, np.ndarray]


def _name_items(text: np.ndarray) -> str:
    return "bytes" if text.dtype == np.uint8 else "tokens"


def _generator(seed: int, step: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))


class _Steps(Iterator[Batch]):
    """The batches of steps 0 to `num_steps` - 1; may resume at any of them."""

    def __init__(self, batch_of: Callable[[int], Batch], num_steps: int):
        self._batch_of, self._num_steps = batch_of, num_steps
        self._next_step = 0

    def __next__(self) -> Batch:
        if self._next_step >= self._num_steps:
            raise StopIteration
        self._next_step += 1
        return self._batch_of(self._next_step - 1)

    def get_state(self) -> dict[str, int]:
        return {"next_step": self._next_step}

    def set_state(self, state: Mapping[str, int]) -> None:
        self._next_step = state["next_step"]


@dataclass(frozen=True)
class RandomWindows:
    """Batches `{"tokens": [batch_size, length + 1]}` of windows that start anywhere in a text."""

    text: np.ndarray
    """`[bytes]` uint8, or `[tokens]` int32."""
    length: int
    """Bytes or tokens predicted per window; a window has one more."""
    batch_size: int
    """Windows per global batch."""
    seed: int
    """Seed that selects the windows."""
    num_steps: int
    """Number of batches."""

    def __post_init__(self):
        """Refuses a text without a window."""
        if len(self.text) <= self.length:
            raise ValueError(
                f"The training text has {len(self.text)} {_name_items(self.text)}, fewer than one "
                f"window of {self.length} + 1. Use more text, or a smaller --sequence-length."
            )

    def __len__(self) -> int:
        """The number of batches."""
        return self.num_steps

    def __getitem__(self, step: int) -> Batch:
        """The batch of step `step`."""
        starts = _generator(self.seed, step).integers(
            len(self.text) - self.length, size=self.batch_size
        )
        return {"tokens": self.text[starts[:, None] + np.arange(self.length + 1)]}

    def __iter__(self) -> Iterator[Batch]:
        """The batches in order."""
        return _Steps(self.__getitem__, self.num_steps)


@dataclass(frozen=True)
class ShuffledEpochs:
    """Full batches of `arrays`: each epoch has an order of its own, and a batch may span two."""

    arrays: Mapping[str, np.ndarray]
    """Arrays of the same number of rows."""
    batch_size: int
    """Rows per global batch."""
    seed: int
    """Seed of the orders."""
    num_steps: int
    """Number of batches."""

    def __len__(self) -> int:
        """The number of batches."""
        return self.num_steps

    def __getitem__(self, step: int) -> Batch:
        """The batch of step `step`."""
        num_rows = len(next(iter(self.arrays.values())))
        epochs, rows = divmod(
            np.arange(step * self.batch_size, (step + 1) * self.batch_size), num_rows
        )
        orders = {
            epoch: _generator(self.seed, int(epoch)).permutation(num_rows) for epoch in set(epochs)
        }
        picked = np.array([orders[epoch][row] for epoch, row in zip(epochs, rows, strict=True)])
        return {name: array[picked] for name, array in self.arrays.items()}

    def __iter__(self) -> Iterator[Batch]:
        """The batches in order."""
        return _Steps(self.__getitem__, self.num_steps)


@dataclass(frozen=True)
class InOrder:
    """Batches of `arrays` in order, once; the last may be smaller."""

    arrays: Mapping[str, np.ndarray]
    """Arrays of the same number of rows."""
    batch_size: int
    """Rows per global batch."""

    def __len__(self) -> int:
        """The number of batches."""
        return -(-len(next(iter(self.arrays.values()))) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """The batches in order."""
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield {
                name: array[start : start + self.batch_size] for name, array in self.arrays.items()
            }
