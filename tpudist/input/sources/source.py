"""Interfaces between a source of batches and the feeds that split its batches over replicas.

`IndexedDataset`, `IterableSource` and `Rebatched` are sources. `adapt.to_source` makes one from a
dataset of the user.
"""

from collections.abc import Iterator
from typing import Any, Protocol, Self

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.iterator_state import State


class RowBatch(Protocol):
    """One batch, whose rows may be read only when they are taken."""

    @property
    def treedef(self) -> jax.tree_util.PyTreeDef:
        """Structure of the batch."""
        ...

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        ...

    def take(self, positions: np.ndarray, *, copy: bool) -> list[np.ndarray]:
        """Returns the rows at `positions` for each leaf, in the dtypes that JAX will use.

        Args:
            positions: Integers of any shape, from 0 to `num_rows` - 1.
            copy: Whether the result must not share memory with the source.
        """
        ...


class SourcePass(Iterator[RowBatch], Protocol):
    """One pass through a source: an iterator whose position can be saved."""

    def get_state(self) -> State:
        """Returns the position after the last batch, as values of JSON."""
        ...


class BatchSource(Protocol):
    """A source of batches."""

    @property
    def name(self) -> str:
        """Name of the kind of dataset, for messages."""
        ...

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full batch; None if only the batches tell."""
        ...

    @property
    def cardinality(self) -> int:
        """Number of batches of a pass; -1 if it has no end, -2 if unknown."""
        ...

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of a full batch; may read the first batch."""
        ...

    @property
    def owns_memory(self) -> bool:
        """Whether nobody writes to the arrays of a batch after it was returned."""
        ...

    @property
    def plan(self) -> dict[str, Any]:
        """Properties that determine the batches, as values of JSON; states depend on them."""
        ...

    def shuffle_without_seed(self) -> str | None:
        """Returns the name of an unseeded generator that shuffles the data, if one is found."""
        ...

    def with_orders_of(self, version: int) -> Self:
        """Returns the source with the shuffles of states of this version."""
        ...

    def begin(self, pass_number: int, state: State | None = None) -> SourcePass:
        """Returns the batches of a pass from the position of `state` on, or from the start."""
        ...
