"""How many rows a full batch has, for each shape that its examples come in.

Sequences are often put in buckets by their lengths, with a batch size for each. So the rows of a
full batch are asked of batches of one shape: they are the most that any of them had so far. What
has fewer is a partial one, and padded up to there; a larger one makes those after it partial.
"""

from typing import Any

from tpudist.input.iterator_state import read_count

_KEY = "sizes by shape"


class FullSizes:
    """The rows of full batches; see the module."""

    def __init__(self):
        """None is known."""
        self._sizes: dict[str, int] = {}
        self._said: int | None = None

    @property
    def largest(self) -> int | None:
        """The rows of the largest batch; None before there was any."""
        return max(self._sizes.values(), default=self._said)

    def note(self, kind: str, num_rows: int) -> int:
        """Notes a batch: the rows of a full one of its kind, which are no fewer than it has.

        Args:
            kind: The dtypes and shapes of its arrays, but for the number of rows.
            num_rows: How many it has.
        """
        known = self._sizes.get(kind, self._said or 0)
        self._said = None
        self._sizes[kind] = max(known, num_rows)
        return self._sizes[kind]

    def get_state(self) -> dict[str, Any]:
        """What a state says of them, beside the largest, in the words of JSON."""
        return {_KEY: dict(self._sizes)} if len(self._sizes) > 1 else {}

    def restore(self, state: dict[str, Any], key: str) -> None:
        """As they were when a state was taken, which has the largest under `key`.

        Raises:
            ValueError: The state is damaged.
        """
        largest = read_count(state, key)
        if self._sizes:
            return
        sizes = state.get(_KEY)
        if isinstance(sizes, dict):
            self._sizes = {kind: read_count(sizes, kind) for kind in sizes}
        else:
            self._said = largest or None
