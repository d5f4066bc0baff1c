"""Who reads what: which rows of a global batch belong to which replica. Integers only.

A global batch of B rows over n replicas gives each replica B // n rows, and one more to the first
B % n of them: its *quota*. A partial batch of b rows is split in parts of ceil(b / n), as
`tf.distribute` does by default (6 rows on 2 replicas: 3 + 3), so that few replicas have no rows.
With auto-sharding off, a partial batch fills the quotas of the first replicas first (6 rows of
B = 8 on 2 replicas: 4 + 2), as in `tf.distribute`.

Shapes are static: a replica's part always has the size of the largest quota, and what is not filled
repeats a real row. Never zeros: what a model makes of them, such as log(0), is masked out of the
loss, but the gradient of a masked NaN is NaN.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Assignment:
    """How the rows of every batch are split over the replicas.

    Attributes:
        global_batch_size: Rows of a full batch, over all replicas.
        num_replicas: Number of replicas.
        in_equal_parts: Whether all quotas are ceil(B / n), as long as there are rows.
    """

    global_batch_size: int
    num_replicas: int
    in_equal_parts: bool = False

    def __post_init__(self):
        """Checks the counts; callers have told their users already."""
        assert self.global_batch_size > 0, self
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
        """Position in the batch of the replica's first row, or where it ends if it has none."""
        if self.in_equal_parts:
            return min(
                replica * -(-self.global_batch_size // self.num_replicas), self.global_batch_size
            )
        each, left_over = divmod(self.global_batch_size, self.num_replicas)
        return replica * each + min(replica, left_over)

    def rows(self, num_rows: int) -> tuple[int, ...]:
        """How many of the `num_rows` rows of a batch each replica reads."""
        assert 0 < num_rows <= self.global_batch_size, (num_rows, self)
        return tuple(
            min(max(num_rows - self.start(replica), 0), quota)
            for replica, quota in enumerate(self.quotas)
        )

    def positions(
        self, num_rows: int, replicas: Sequence[int], part_size: int | None = None
    ) -> np.ndarray:
        """Which row of a batch of `num_rows` stands where in the parts of `replicas`.

        Args:
            num_rows: Rows of the batch.
            replicas: The replicas.
            part_size: Rows of a part, padding included; by default `rows_per_replica`.

        Returns:
            Integers `[len(replicas), part_size]`. After its real rows a replica repeats the
            last of them; one that has none repeats row 0.
        """
        rows = self.rows(num_rows)
        within = np.arange(part_size or self.rows_per_replica)
        parts = [
            self.start(replica) + np.minimum(within, rows[replica] - 1)
            if rows[replica]
            else np.zeros_like(within)
            for replica in replicas
        ]
        return np.stack(parts)


def num_batches(num_rows: int, global_batch_size: int, *, drop_remainder: bool) -> int:
    """Number of batches that `num_rows` rows make, the partial one counted unless dropped."""
    full, left_over = divmod(num_rows, global_batch_size)
    return full + (left_over > 0 and not drop_remainder)
