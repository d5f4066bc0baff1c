"""Which arguments of a call are parts of one global batch, and share its rows."""

import dataclasses
from collections.abc import Sequence

from tpudist.values.per_replica import PerReplica


@dataclasses.dataclass(frozen=True)
class RowGroups:
    """The partial batches among the arguments of a call.

    Full batches are no group, where no batch is partial: their program knows of no padding.

    Attributes:
        sizes: For each distinct tuple of real rows among the arguments: the padded rows per
            replica.
        dims: For each of them, which dim of the parts holds the rows.
    """

    sizes: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(
        cls, values: Sequence[PerReplica]
    ) -> tuple["RowGroups | None", tuple[tuple[int, ...], ...]]:
        """The groups, and the real rows of each; none if every batch is full."""
        found: dict[tuple[int, tuple[int, ...], int], None] = {}
        partial = False
        for x in values:
            if x.rows is not None and len(x.shape):
                size = x.shape[x.dim]
                found[(size, x.rows, x.dim)] = None
                partial = partial or any(rows != size for rows in x.rows)
        if not partial:
            return None, ()
        sizes, rows, dims = zip(*found, strict=True)
        return cls(sizes, dims), rows
