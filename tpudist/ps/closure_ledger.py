"""ClosureLedger: the set of finished closures, in memory for the unfinished ones only."""

from collections.abc import Iterable


class ClosureLedger:
    """A set of whole numbers from 0, to which every number is added at some time.

    It stores the first missing number and the numbers above it, so its size is the number of
    closures in flight and not the number of all closures.

    Args:
        low: All numbers below this one are in the set.
        above: Further numbers in the set.

    Attributes:
        low: First missing number.
    """

    def __init__(self, low: int = 0, above: Iterable[int] = ()):
        self.low = low
        self._above: set[int] = set()
        for number in above:
            self.add(number)

    def __contains__(self, number: int) -> bool:
        return number < self.low or number in self._above

    def __len__(self) -> int:
        return self.low + len(self._above)

    def add(self, number: int) -> bool:
        """Adds a number; returns whether it was missing."""
        if number in self:
            return False
        self._above.add(number)
        self._close_gap()
        return True

    def _close_gap(self) -> None:
        # Invariant: `low` is not in `_above`. Each number is discarded once, so `add` is O(1) on
        # average.
        while self.low in self._above:
            self._above.discard(self.low)
            self.low += 1

    def raise_to(self, low: int) -> None:
        """Adds all numbers below `low`."""
        if low > self.low:
            self.low = low
            self._above = {x for x in self._above if x >= low}
            self._close_gap()

    def above(self) -> list[int]:
        """Returns the numbers above `low`, in order."""
        return sorted(self._above)
