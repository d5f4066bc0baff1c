"""The numbers of rows that the batches of a trace have, if some batch is partial."""

from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp

from tpudist.programs.rows import replica_rows
from tpudist.programs.rows.errors import RowsError
from tpudist.xla import collectives


class TracedRows:
    """The numbers of rows of one trace of a function whose batches may be partial.

    `PartialBatch` traces the function for several numbers of rows, to learn which values depend on
    them. Two kinds of numbers are not functions of the replica's own rows: the rows of the parts
    into which a batch is split, and the rows of all replicas together. The caller chooses those
    independently, so that an expression in one is not mistaken for one in another.

    Args:
        counts: The rows of the batches among the arguments.
        rows_of_parts: The rows of parts, in the order of the splits; None to learn the splits.
        gathered: The rows of all replicas together, by the number of the gather in the trace.
        differing: Numbers of those results of a nested `strategy.run` that look equal on all
            replicas, and depend on the rows.

    Attributes:
        parts: For each split of a batch: the number of parts, the rows of the batch, and the rows
            of each part in this trace.
    """

    def __init__(
        self,
        counts: Sequence[int],
        rows_of_parts: Sequence[int] | None = None,
        gathered: Mapping[int, int] | None = None,
        differing: Collection[int] = (),
    ):
        self._counts = counts
        self._rows_of_parts = rows_of_parts
        self._gathered, self._differing = gathered or {}, differing
        self.parts: list[tuple[int, int, int]] = []
        # Splits, gathers and claims are recognized in other traces by their position: all traces
        # run the same Python code in the same order. `RowTraces` checks the number of splits. Each
        # gather and claim is also an operation of the program, which `RowProgram` compares.
        self._num_gathers = self._num_claims = 0

    def begin_parts(self, rows: int, num_parts: int) -> int:
        """Returns the rows of each part of a batch of `rows` rows in this trace."""
        if self._rows_of_parts is None:
            rows_of_part = rows // num_parts
        elif len(self.parts) < len(self._rows_of_parts):
            rows_of_part = self._rows_of_parts[len(self.parts)]
        else:
            raise RowsError("with another number of rows it splits a batch again")
        self.parts.append((num_parts, rows, rows_of_part))
        return rows_of_part

    def whole_of_parts(self, num_parts: int, rows: int) -> int:
        """Returns the rows of the batch of the last split into such parts."""
        for parts, whole, rows_of_part in reversed(self.parts):
            if (parts, rows_of_part) == (num_parts, rows):
                return whole
        raise ValueError(
            f"rows_of_microbatches received arrays of {num_parts} parts of {rows} rows each, but "
            "value_and_grad_in_microbatches has not made such parts of a batch here. Pass aux "
            "results that it returned."
        )

    def gather(self, x: jax.Array, dim: int) -> jax.Array:
        """Concatenates the parts of all replicas along a dim."""
        index, self._num_gathers = self._num_gathers, self._num_gathers + 1
        rows = self._gathered.get(index, x.shape[dim] * collectives.num_replicas())
        return replica_rows.gather(x, dim, index, rows)

    def keep_equal(self, x: jax.Array) -> jax.Array | None:
        """Returns a value that looks equal on all replicas; None if it is known to differ."""
        index, self._num_claims = self._num_claims, self._num_claims + 1
        return None if index in self._differing else replica_rows.claim_equal(x, index)

    def keep_on_empty_replicas(
        self, new: Sequence[jax.Array], old: Mapping[int, jax.Array]
    ) -> list[jax.Array]:
        """Returns `new`; on replicas without rows, values with an old one do not change."""
        kept = list(new)
        if old:
            empty = jnp.stack([jnp.asarray(x, jnp.int32) for x in self._counts]).min() == 0
            kept = [jnp.where(empty, old[i], x) if i in old else x for i, x in enumerate(kept)]
        return kept
