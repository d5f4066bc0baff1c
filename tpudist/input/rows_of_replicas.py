"""Computes which rows of a global batch belong to which replica.

Of a global batch of B rows over n replicas, each replica gets B // n rows, and the first B % n get
one more: the *quota* of a replica. A partial batch of b rows is split in parts of ceil(b / n), as
`tf.distribute` does by default (6 rows on 2 replicas: 3 + 3), so that few replicas have no rows.
With auto-sharding off, a partial batch fills the quotas of the first replicas (6 rows of B = 8 on 2
replicas: 4 + 2), also as in `tf.distribute`.

Shapes are static: a replica's part always has the size of the largest quota, and padding repeats a
real row. Padding is never zeros: a loss masks what a model computes from them, such as log(0), but
the gradient of a masked NaN is NaN.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The split of a batch over the replicas.

    Attributes:
        num_rows: Rows to split: of a full batch, or of a partial one in equal parts.
        num_replicas: Number of replicas.
        in_equal_parts: Whether all quotas are ceil(B / n), until the rows end.
    """

    num_rows: int
    num_replicas: int
    in_equal_parts: bool = False

    def __post_init__(self):
        assert self.num_rows > 0, self
        assert self.num_replicas > 0, self

    @functools.cached_property
    def quotas(self) -> tuple[int, ...]:
        """Rows of a full batch that each replica reads."""
        starts = [self.start(replica) for replica in range(self.num_replicas + 1)]
        return tuple(end - start for start, end in itertools.pairwise(starts))

    @property
    def rows_per_replica(self) -> int:
        """Rows of a replica's part, padding included."""
        return self.quotas[0]

    def start(self, replica: int) -> int:
        """Returns the position of the replica's first row; without rows, the end of the batch."""
        if self.in_equal_parts:
            return min(replica * -(-self.num_rows // self.num_replicas), self.num_rows)
        quota, remainder = divmod(self.num_rows, self.num_replicas)
        return replica * quota + min(replica, remainder)

    def rows(self, num_present: int) -> tuple[int, ...]:
        """Returns the rows of each replica, for a batch with the first `num_present` rows."""
        assert 0 < num_present <= self.num_rows, (num_present, self)
        return tuple(
            min(max(num_present - self.start(replica), 0), quota)
            for replica, quota in enumerate(self.quotas)
        )

    def positions(
        self, num_present: int, replicas: Sequence[int], part_size: int | None = None
    ) -> np.ndarray:
        """Returns the row of the batch at each position of the parts of `replicas`.

        Args:
            num_present: Rows of the batch.
            replicas: The replicas.
            part_size: Rows of a part, padding included. Default: `rows_per_replica`.

        Returns:
            Integers `[len(replicas), part_size]`. Padding repeats the last real row of a replica;
            a replica without rows repeats row 0.
        """
        rows = self.rows(num_present)
        within = np.arange(part_size or self.rows_per_replica)
        parts = [
            self.start(replica) + np.minimum(within, rows[replica] - 1)
            if rows[replica]
            else np.zeros_like(within)
            for replica in replicas
        ]
        return np.stack(parts)


def num_batches(num_rows: int, global_batch_size: int, *, drop_remainder: bool) -> int:
    """Returns the number of batches of `num_rows` rows, with the partial one unless dropped."""
    num_full, remainder = divmod(num_rows, global_batch_size)
    return num_full + (remainder > 0 and not drop_remainder)
