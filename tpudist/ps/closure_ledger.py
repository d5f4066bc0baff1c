"""ClosureLedger: a set of closure numbers, in memory proportional to the closures in flight."""

from collections.abc import Iterable


class ClosureLedger:
    """A set of numbers from 0, which are added in any order.

    No number is left out forever. So the set stores the first missing number and the numbers above
    it, which belong to closures that overtook an unfinished one.

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
        self._advance_low()
        return True

    def _advance_low(self) -> None:
        # Invariant: `low` is not in `_above`. Each number is discarded once, here or in
        # `add_below`, so both are O(1) on average if `low` grows by steps. `add_below` looks at
        # each number above instead if those are fewer than the numbers of its step.
        while self.low in self._above:
            self._above.discard(self.low)
            self.low += 1

    def add_below(self, low: int) -> None:
        """Adds all numbers below `low`."""
        if low > self.low:
            if low - self.low <= len(self._above):
                self._above.difference_update(range(self.low, low))
            else:
                self._above = {x for x in self._above if x >= low}
            self.low = low
            self._advance_low()

    def above(self) -> list[int]:
        """Returns the numbers above `low`, in order."""
        return sorted(self._above)
