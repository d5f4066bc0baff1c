"""The batches of a run: passes through its data, from an iterator that checkpoints contain."""

from __future__ import annotations

from typing import Any

from tpudist.input.dataset import DistributedDataset
from tpudist.input.iterator import DistributedIterator
from tpudist.input.sources.no_batches import NoBatches
from tpudist.strategy.strategy import Strategy
from tpudist.training.train_options import check_interval

# Cardinalities of data without a length, as in tf.data.
_INFINITE, _UNKNOWN = -1, -2


class Passes:
    """Batches, one pass through the data after the other.

    Args:
        strategy: Strategy that runs the steps; it distributes data that are not distributed yet.
        data: Argument `data` of `train`.

    Attributes:
        batches: Iterator of the current pass.
        cardinality: Batches of a pass; as in tf.data, -1 if it is infinite, -2 if it is unknown.

    Raises:
        TypeError: If `data` contains no batches.
        ValueError: If `data` is not batched, or another strategy distributed it.
    """

    def __init__(self, strategy: Strategy, data: Any):
        self._dataset: DistributedDataset | None = None
        self._counts_epochs = False  # whether `count_steps` has used `cardinality`
        if isinstance(data, DistributedIterator):
            self.batches = data
            self.cardinality = _UNKNOWN  # an iterator has no length
            return
        if isinstance(data, DistributedDataset):
            dataset = data
        elif strategy.keeps_datasets:
            # The default strategy returns a dataset unchanged, but checkpoints need an iterator
            # that can save its position.
            dataset = DistributedDataset(data, strategy.replica_mesh, strategy=strategy)
        else:
            dataset = strategy.experimental_distribute_dataset(data)
        if dataset.strategy is not None and dataset.strategy is not strategy:
            raise ValueError(
                f"train(data=...): {type(dataset.strategy).__name__} distributed the data, but "
                f"another strategy, {type(strategy).__name__}, runs the steps. Distribute the "
                f"data with the strategy that trains, or pass the original dataset."
            )
        self._dataset = dataset
        self.cardinality = dataset.cardinality
        self.batches = iter(dataset)

    def count_steps(self, num_steps: int | None, num_epochs: int | None) -> int:
        """Returns the total number of steps of a run.

        With `num_epochs`, `next_batch` later checks that each pass has `cardinality` batches.

        Raises:
            ValueError: If neither or both numbers are given, one is not a whole number of at least
                1, or the data has no length.
        """
        if (num_steps is None) == (num_epochs is None):
            both = "neither num_steps nor num_epochs" if num_steps is None else "both"
            raise ValueError(
                f"train() received {both}. Pass exactly one of them: num_steps=1000, or "
                f"num_epochs=3."
            )
        if num_steps is not None:
            check_interval("train", "num_steps", num_steps)
            return num_steps
        check_interval("train", "num_epochs", num_epochs)
        assert num_epochs is not None
        if self.cardinality < 0:
            reason = "never ends" if self.cardinality == _INFINITE else "has no known length"
            raise ValueError(
                f"train(num_epochs={num_epochs}): the data {reason}, so the number of steps is "
                f"unknown. Pass num_steps instead, or data with a length."
            )
        self._counts_epochs = True
        # Without batches, the first step raises NoBatches.
        return num_epochs * max(self.cardinality, 1)

    def next_batch(self, num_started: int, num_steps: int) -> tuple[Any, float]:
        """Returns the next batch, and the seconds that the caller waited for it.

        Args:
            num_started: Number of steps that were started, for messages.
            num_steps: Total number of steps of the run, for messages.

        Raises:
            ValueError: If the data ended and cannot be iterated again; or if epochs are counted,
                and the pass had another number of batches than `len(data)`.
            NoBatches: If the data has no batches at all; the iterator has warned of that.
        """
        try:
            return self._take()
        except StopIteration:
            pass
        # The pass has ended. The position in a resumed iterator counts from the start of its pass,
        # so `num_batches` is the length of the pass also if it began before the restart.
        if self._dataset is None:
            # 0 means that the pass has no batches at all.
            if not self.batches.position.step:
                raise NoBatches
            raise ValueError(
                f"train(data=...): the iterator ended after {num_started} of {num_steps} steps and "
                f"cannot start again. Pass the dataset itself, which can be iterated again, or "
                f"use num_steps={num_started}."
            )
        num_batches = self.batches.position.step
        # 0 batches are an error of their own (NoBatches), which the next pass below raises.
        if self._counts_epochs and num_batches not in (0, self.cardinality):
            raise ValueError(
                f"train(num_epochs=...): len(data) is {self.cardinality}, but a pass through it "
                f"has {num_batches} batches. To count epochs, len(data) must be the number of "
                f"batches, not of examples. Correct it, or pass num_steps."
            )
        self.batches = iter(self._dataset)
        try:
            return self._take()
        except StopIteration:
            if not num_started:
                raise NoBatches from None
            raise ValueError(
                f"train(data=...): the data has no more batches after {num_started} steps, with "
                f"{num_steps - num_started} steps left. Pass data that has batches in every pass."
            ) from None

    def _take(self) -> tuple[Any, float]:
        batches = self.batches
        # A sum over the life of the iterator, so one step waits for the difference.
        waited_s = batches.waited_s
        batch = next(batches)
        return batch, batches.waited_s - waited_s
