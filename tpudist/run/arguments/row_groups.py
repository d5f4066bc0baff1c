"""Finds the arguments of a call that are parts of one global batch, and share its rows."""

import dataclasses
from collections.abc import Sequence

from tpudist.values.per_replica import PerReplica


@dataclasses.dataclass(frozen=True)
class RowGroups:
    """The partial batches among the arguments of a call.

    If no batch is partial there are no groups, and the program has no padding.

    Attributes:
        sizes: For each distinct tuple of real rows among the arguments, the padded rows per
            replica.
        members: For each PerReplica argument, in order, the dims of its parts that are rows, each
            with its group. Batches with equal numbers of rows in one call may have different
            numbers in the next one, which is another program then.
    """

    sizes: tuple[int, ...]
    members: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(
        cls, values: Sequence[PerReplica]
    ) -> tuple["RowGroups | None", tuple[tuple[int, ...], ...]]:
        """Returns the groups, and the real rows of each replica in each group.

        None and an empty tuple if every batch is full. It is on the path of each call.
        """
        if are_full(values):
            return None, ()
        # The number of a group by its key: padded rows, and real rows of each replica.
        group_of: dict[tuple[int, tuple[int, ...]], int] = {}
        members = []
        for x in values:
            extents = x.extents if x.shape else {}
            own = {dim: (x.shape[dim], rows) for dim, rows in extents.items()}
            members.append(
                tuple((d, group_of.setdefault(k, len(group_of))) for d, k in own.items())
            )
        if all(real == size for size, rows in group_of for real in rows):
            return None, ()
        sizes, rows = zip(*group_of, strict=True)
        return cls(sizes, tuple(members)), rows


def are_full(values: Sequence[PerReplica]) -> bool:
    """Whether every batch is full, as in almost all calls; False if a closer look is needed."""
    # Loops without a Python call for each value, because values may be many.
    for x in values:
        if x.rows is None:
            continue
        shape = x.array.shape  # `[num_replicas, ...]`
        if x.other_rows or len(shape) < 2:
            return False
        size = shape[x.dim + 1]
        for real in x.rows:
            if real != size:
                return False
    return True
