"""How many rows the batches of a trace have, where some batch is partial."""

from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp

from tpudist.programs.rows import replica_rows
from tpudist.programs.rows.errors import RowsError
from tpudist.xla import collectives


class TracedRows:
    """How many rows the batches of one trace have, where some batch is partial.

    A function is traced at several numbers of rows, to learn what depends on them. Some numbers are
    no functions of a replica's own: those of the parts that a batch is split into, and those of all
    replicas together. They are chosen apart.

    Attributes:
        parts: For each split of a batch: the number of parts, the rows of the whole, and of each
            part in this trace.
    """

    def __init__(
        self,
        counts: Sequence[int],
        rows_of_parts: Sequence[int] | None = None,
        gathered: Mapping[int, int] | None = None,
        differing: Collection[int] = (),
    ):
        """How many rows there are.

        Args:
            counts: Of the batches among the arguments.
            rows_of_parts: Of parts, in the order of the splits; None to learn which there are.
            gathered: Of all replicas together, by the number of the gather.
            differing: The numbers of those results of `strategy.run` in a function that look equal
                on all replicas, and depend on the rows.
        """
        self._counts = counts
        self._rows_of_parts = rows_of_parts
        self._gathered, self._differing = gathered or {}, differing
        self.parts: list[tuple[int, int, int]] = []
        self._num_gathers = self._num_claims = 0

    def begin_parts(self, rows: int, num_parts: int) -> int:
        """How many rows each part of a batch of `rows` rows has in this trace."""
        if self._rows_of_parts is None:
            each = rows // num_parts
        elif len(self.parts) < len(self._rows_of_parts):
            each = self._rows_of_parts[len(self.parts)]
        else:
            raise RowsError("with another number of rows it splits a batch again")
        self.parts.append((num_parts, rows, each))
        return each

    def whole_of_parts(self, num_parts: int, rows: int) -> int:
        """Of how many rows the last split was that made such parts."""
        for parts, whole, each in reversed(self.parts):
            if (parts, each) == (num_parts, rows):
                return whole
        raise ValueError(
            f"rows_of_microbatches received arrays of {num_parts} parts of {rows} rows each, but "
            "value_and_grad_in_microbatches has not made such parts of a batch here. Pass aux "
            "results that it returned."
        )

    def gather(self, x: jax.Array, dim: int) -> jax.Array:
        """The parts of all replicas along a dim, one after another."""
        index, self._num_gathers = self._num_gathers, self._num_gathers + 1
        rows = self._gathered.get(index, x.shape[dim] * collectives.num_replicas())
        return replica_rows.gather(x, dim, index, rows)

    def keep_equal(self, x: jax.Array) -> jax.Array | None:
        """A value that looks equal on all replicas; None where it is known to differ."""
        index, self._num_claims = self._num_claims, self._num_claims + 1
        return None if index in self._differing else replica_rows.claim_equal(x, index)

    def keep_state(self, new: Sequence[jax.Array], old: Mapping[int, jax.Array]) -> list[jax.Array]:
        """New values, of which those with an old one stay as they were on replicas without rows."""
        kept = list(new)
        if old:
            empty = jnp.stack([jnp.asarray(x, jnp.int32) for x in self._counts]).min() == 0
            kept = [jnp.where(empty, old[i], x) if i in old else x for i, x in enumerate(kept)]
        return kept
