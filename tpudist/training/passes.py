"""The data of a run: gone through as often as its steps need, from an iterator that is saved."""

from __future__ import annotations

from typing import Any

from tpudist.input.dataset import DistributedDataset
from tpudist.input.iterator import DistributedIterator
from tpudist.input.sources.no_batches import NoBatches
from tpudist.options import shorten
from tpudist.strategy.strategy import Strategy


class Passes:
    """Batches, one pass through the data after the other.

    Attributes:
        batches: The iterator of the pass that is under way.
        cardinality: Batches of a pass; as in tf.data, -1 without an end, -2 if not known.
        counts_epochs: Whether the number of steps was computed from `cardinality`.
    """

    counts_epochs = False

    def __init__(self, strategy: Strategy, data: Any):
        """Distributes `data`, unless it is.

        Raises:
            TypeError: It gives no batches.
            ValueError: It is not batched, or has been distributed by another strategy.
        """
        self._dataset: DistributedDataset | None = None
        if isinstance(data, DistributedIterator):
            self.batches = data
            self.cardinality = -2
            return
        if isinstance(data, DistributedDataset):
            dataset = data
        elif strategy.keeps_datasets:
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

    def next_batch(self, step: int, num_steps: int) -> tuple[Any, float]:
        """The next batch, and how many seconds it was waited for.

        Args:
            step: Steps that were begun.
            num_steps: Those of the run.

        Raises:
            ValueError: There is none, and no way to begin anew; or epochs are counted, and the pass
                did not have as many batches as the data said.
            NoBatches: The data has none at all, of which the user was warned.
        """
        try:
            return self._take()
        except StopIteration:
            pass
        if self._dataset is None:
            if not self.batches.position.step:
                raise NoBatches
            raise ValueError(
                f"train(data=...): the iterator ended after {step} of {num_steps} steps and "
                f"cannot start again. Pass the dataset itself, which can be iterated again, or "
                f"use num_steps={step}."
            )
        found = self.batches.position.step
        if self.counts_epochs and found not in (0, self.cardinality):
            raise ValueError(
                f"train(num_epochs=...): len(data) is {self.cardinality}, but a pass through it "
                f"has {found} batches. To count epochs, len(data) must be the number of batches, "
                f"not of examples. Correct it, or pass num_steps."
            )
        self.batches = iter(self._dataset)
        try:
            return self._take()
        except StopIteration:
            if not step:
                raise NoBatches from None
            raise ValueError(
                f"train(data=...): the data has no more batches after {step} steps, with "
                f"{num_steps - step} steps left. Pass data that has batches in every pass."
            ) from None

    def _take(self) -> tuple[Any, float]:
        batches = self.batches
        waited_s = batches.waited_s
        batch = next(batches)
        return batch, batches.waited_s - waited_s


def count_steps(passes: Passes, num_steps: int | None, num_epochs: int | None) -> int:
    """How many steps a run has.

    Raises:
        ValueError: Neither or both numbers are given, one is below 1, or the data has no length.
    """
    if (num_steps is None) == (num_epochs is None):
        both = "neither num_steps nor num_epochs" if num_steps is None else "both"
        raise ValueError(
            f"train() received {both}. Pass exactly one of them: num_steps=1000, or num_epochs=3."
        )
    name, number = ("num_steps", num_steps) if num_epochs is None else ("num_epochs", num_epochs)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(
            f"train({name}={shorten(number)}): {name} must be a whole number of at least 1."
        )
    if num_epochs is None:
        return number
    if passes.cardinality < 0:
        why = "never ends" if passes.cardinality == -1 else "has no known length"
        raise ValueError(
            f"train(num_epochs={num_epochs}): the data {why}, so the number of steps is unknown. "
            f"Pass num_steps instead, or data with a length."
        )
    passes.counts_epochs = True
    return number * max(passes.cardinality, 1)  # without batches, the first step finds none
