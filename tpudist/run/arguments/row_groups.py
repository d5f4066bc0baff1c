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
        members: For each PerReplica argument, in order: the dims of its parts that are rows, each
            with its group. Batches that have as many rows in one call may have other numbers in
            the next one, which is another program then.
    """

    sizes: tuple[int, ...]
    members: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(
        cls, values: Sequence[PerReplica]
    ) -> tuple["RowGroups | None", tuple[tuple[int, ...], ...]]:
        """The groups, and the real rows of each; none if every batch is full."""
        found: dict[tuple[int, tuple[int, ...]], int] = {}
        members = []
        for x in values:
            extents = x.extents if x.shape else {}
            own = {dim: (x.shape[dim], rows) for dim, rows in extents.items()}
            members.append(tuple((d, found.setdefault(k, len(found))) for d, k in own.items()))
        if all(real == size for size, rows in found for real in rows):
            return None, ()
        sizes, rows = zip(*found, strict=True)
        return cls(sizes, tuple(members)), rows
