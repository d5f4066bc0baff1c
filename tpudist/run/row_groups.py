"""Which arguments of a call are parts of one global batch, and share its rows."""

import dataclasses
from collections.abc import Sequence

from tpudist.values.per_replica import PerReplica


@dataclasses.dataclass(frozen=True)
class RowGroups:
    """Which PerReplica arguments share their numbers of real rows.

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
        """The groups, or None if there are none, and the real rows of each."""
        found: dict[tuple[int, tuple[int, ...], int], None] = {}
        for x in values:
            if x.rows is not None and len(x.shape):
                found[(x.shape[x.dim], x.rows, x.dim)] = None
        if not found:
            return None, ()
        sizes, rows, dims = zip(*found, strict=True)
        return cls(sizes, dims), rows

    @property
    def unambiguous(self) -> dict[int, int | None]:
        """For each size of dim 0, the index of its only group; None if there are several."""
        groups = [i for i, dim in enumerate(self.dims) if dim == 0]
        sizes = [self.sizes[i] for i in groups]
        return {
            size: groups[sizes.index(size)] if sizes.count(size) == 1 else None for size in sizes
        }

    def only_one_of(self, size: int) -> int | None:
        """The group with so many rows, whatever their dim; None if there are none, or several."""
        return self.sizes.index(size) if self.sizes.count(size) == 1 else None
