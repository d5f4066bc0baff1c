"""One replica's part of a step, and how many real rows each part has."""

from typing import Any, NamedTuple

import jax
import numpy as np


class Batch(NamedTuple):
    """What one replica takes: arrays `[rows, ...]`; any arrays, if `num_rows` is None."""

    leaves: list[np.ndarray]
    treedef: jax.tree_util.PyTreeDef
    num_rows: int | None

    @property
    def description(self) -> str:
        """Its structure, and what its arrays hold, but for the number of rows."""
        return f"{self.treedef} of {describe_shapes(self)}"


Step = list[Batch | None]  # for each replica of this process; None where there is none left


def describe_shapes(batch: Any) -> str:
    """The dtypes and shapes of a batch's arrays, but for the number of rows."""

    def one(x: np.ndarray) -> str:
        dims = x.shape if batch.num_rows is None else ("rows", *x.shape[1:])
        return f"{x.dtype}[{','.join(map(str, dims))}]"

    return ", ".join(map(one, batch.leaves))


def count_rows(step: Step) -> tuple[int, ...]:
    """How many rows each replica of this process has in a step; 1 if elements are no batches."""
    return tuple(
        0 if batch is None else 1 if batch.num_rows is None else batch.num_rows for batch in step
    )
