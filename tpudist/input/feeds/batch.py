"""One replica's part of a step."""

from typing import NamedTuple, Protocol, TypeAlias

import jax
import numpy as np


class Batch(NamedTuple):
    """The batch of one replica: arrays `[rows, ...]`; any arrays, if `num_rows` is None."""

    leaves: list[np.ndarray]
    treedef: jax.tree_util.PyTreeDef
    num_rows: int | None

    @property
    def description(self) -> str:
        """Structure, dtypes and shapes, without the number of rows."""
        return f"{self.treedef} of {describe_shapes(self)}"


# The batch of each replica of this process; None for a replica whose data has ended.
Step: TypeAlias = list[Batch | None]


class _Rows(Protocol):
    @property
    def leaves(self) -> list[np.ndarray]: ...

    @property
    def num_rows(self) -> int | None: ...


def describe_shapes(batch: _Rows) -> str:
    """Returns the dtypes and shapes of a batch's arrays, without the number of rows."""

    def describe(x: np.ndarray) -> str:
        dims = x.shape if batch.num_rows is None else ("rows", *x.shape[1:])
        return f"{x.dtype}[{','.join(map(str, dims))}]"

    return ", ".join(map(describe, batch.leaves))


def count_rows(step: Step) -> tuple[int, ...]:
    """Returns the rows of each replica of this process; 1 for an element that is not a batch."""
    return tuple(
        0 if batch is None else 1 if batch.num_rows is None else batch.num_rows for batch in step
    )
