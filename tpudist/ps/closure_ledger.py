"""ClosureLedger: which closures were seen, in memory of those that are under way alone."""

from collections.abc import Iterable


class ClosureLedger:
    """A set of whole numbers from 0, all of which come at some time.

    What is kept is the first number that is missing, and those above it that are not: as many as
    closures are under way, not as many as there were.

    Attributes:
        low: All numbers below this one are in the set, and this one is not.
    """

    def __init__(self, low: int = 0, above: Iterable[int] = ()):
        """The numbers below `low`, and those of `above`."""
        self.low = low
        self._above: set[int] = set()
        for number in above:
            self.add(number)

    def __contains__(self, number: int) -> bool:
        return number < self.low or number in self._above

    def __len__(self) -> int:
        return self.low + len(self._above)

    def add(self, number: int) -> bool:
        """Adds a number; whether it was not there."""
        if number in self:
            return False
        self._above.add(number)
        self._close_gap()
        return True

    def _close_gap(self) -> None:
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
        """The numbers above `low`, in order."""
        return sorted(self._above)
