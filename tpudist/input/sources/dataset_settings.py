"""Settings of a dataset whose examples are read by number, and the arithmetic of its batches."""

import dataclasses
from typing import NamedTuple

from tpudist.input import iterator_state, permutation, rows_of_replicas
from tpudist.input.permutation import Order

# Value of both arguments of `shard` if the shard of a process is only known when the dataset is
# distributed. The value of tf.data.
SHARD_HINT = -1


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a dataset's methods.

    Attributes:
        seed: Seed of the shuffle; None without one.
        global_batch_size: Rows of a full batch; None before `batch`.
        drop_remainder: Whether a last batch that is not full is dropped.
        num_epochs: Number of epochs of a pass; None for no end.
        examples: Number of shards of the examples, and the index of the shard that is read.
        batches: The same for shards of the batches of an epoch.
        state_version: Version of the states that have the order of the shuffle.
    """

    seed: int | None = None
    global_batch_size: int | None = None
    drop_remainder: bool = False
    num_epochs: int | None = 1
    examples: tuple[int, int] = (1, 0)
    batches: tuple[int, int] = (1, 0)
    state_version: int = iterator_state.VERSION

    @property
    def shard_of_examples(self) -> tuple[int, int]:
        """`examples`; all of them as long as a SHARD_HINT is not replaced."""
        return (1, 0) if self.examples[0] == SHARD_HINT else self.examples

    def shuffle(self, num_examples: int, epoch: int) -> Order | None:
        """Returns the order of an epoch; None for ascending."""
        if self.seed is None:
            return None
        shuffle = permutation.shuffle_in_memory if self.is_old else permutation.shuffle
        return shuffle(num_examples, self.seed, epoch)

    @property
    def is_old(self) -> bool:
        """Whether the orders match states of version 1."""
        return self.state_version == iterator_state.ARRAYS_VERSION

    def has_order_in_memory(self, num_examples: int) -> bool:
        """Whether the order of a shuffle is an array: of few rows, or for states of version 1."""
        return self.is_old or num_examples <= permutation.MAX_ROWS_IN_MEMORY

    @property
    def has_shard_hint(self) -> bool:
        """Whether a shard is a SHARD_HINT."""
        return SHARD_HINT in (self.examples[0], self.batches[0])

    def count_examples(self, num_rows: int) -> int:
        """Returns the number of examples of the shard, of `num_rows` examples of all shards."""
        num_shards, index = self.shard_of_examples
        return len(range(index, num_rows, num_shards))

    def batches_of_epoch(self, num_rows: int) -> range:
        """Returns the numbers of the batches that are read, of `num_rows` examples of all shards.

        Without `batch`, each example counts as a batch.
        """
        num_batches = rows_of_replicas.num_batches(
            self.count_examples(num_rows),
            self.global_batch_size or 1,
            drop_remainder=self.drop_remainder,
        )
        num_shards, index = (1, 0) if self.batches[0] == SHARD_HINT else self.batches
        return range(index, num_batches, num_shards)


class BatchPlace(NamedTuple):
    """The rows of one batch.

    Attributes:
        epoch: Number of the epoch.
        num_rows: Number of rows.
        start: Position of the first row in `order`.
        order: The order of the epoch; None for ascending.
    """

    epoch: int
    num_rows: int
    start: int
    order: Order | None
