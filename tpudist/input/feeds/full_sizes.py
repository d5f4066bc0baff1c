"""Numbers of rows of full batches, for each shape of examples.

Sequences are often put in buckets by length, with a batch size for each bucket. So for each shape,
the rows of a full batch are the most rows of any batch of that shape so far. A batch with fewer
rows is partial, and padded to that size. After a larger batch, the old size is partial, too.
"""

from tpudist.input.iterator_state import State, read_count, require

_KEY = "sizes by shape"


class FullSizes:
    """The rows of full batches so far; see the module."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        # From a state of an earlier release, without the shape: of the first shape that appears.
        self._restored: int | None = None

    @property
    def largest(self) -> int | None:
        """Rows of the largest batch; None before the first batch."""
        return max(self._sizes.values(), default=self._restored)

    def record(self, shapes: str, num_rows: int) -> int:
        """Records a batch, and returns the rows of a full batch of its shapes.

        Args:
            shapes: Dtypes and shapes of the arrays, without the number of rows.
            num_rows: Number of rows of the batch.
        """
        largest_of_shape = self._sizes.get(shapes, self._restored or 0)
        self._restored = None
        self._sizes[shapes] = max(largest_of_shape, num_rows)
        return self._sizes[shapes]

    def get_state(self) -> State:
        """Returns the part of a state that lists the sizes; empty before the first batch."""
        return {_KEY: dict(self._sizes)} if self._sizes else {}

    def restore(self, state: State, key: str) -> None:
        """Restores the sizes from a state, which has the largest under `key`.

        Sizes that this run has seen itself are kept instead.

        Raises:
            ValueError: If the state is damaged.
        """
        largest, sizes = read_count(state, key), {}
        if _KEY in state:
            stored = state[_KEY]
            sizes = {x: read_count(stored, x) for x in stored} if isinstance(stored, dict) else {}
            require(
                max(sizes.values(), default=None) == largest,
                f"its {_KEY!r} are {stored!r}, but its {key!r} is {largest}",
            )
        if not self._sizes:
            self._sizes, self._restored = sizes, None if sizes else largest or None
