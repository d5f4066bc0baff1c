"""Values that are not those of one device, and whether numbers in the program make up for them."""

import dataclasses
import itertools
import math
from fractions import Fraction

from tpudist.programs.degrees.degree import Factor


@dataclasses.dataclass(frozen=True)
class Fault:
    """A value that is added to state, and is not that of one device.

    Attributes:
        excess: The power of the number of replicas by which it is too large. 0 if it is right
            where all replicas have as many rows: a mean over replicas of means over rows.
        counted: The line that divides by rows or replicas; empty if none does. If `mixed`, the line
            of the addition.
        summed: The line that sums over replicas.
        sources: The state inputs that the value depends on, as bits.
        factors: The numbers that the value was multiplied by after the sum.
        before_sum: The same, before the sum.
        mixed: Whether only one of two addends is too large.
        is_draw: Whether it is none of these: random numbers for each row, equal on all replicas.
    """

    excess: Fraction
    counted: str
    summed: str
    sources: int
    factors: tuple[Factor, ...] = ()
    before_sum: tuple[Factor, ...] = ()
    mixed: bool = False
    is_draw: bool = False

    def may_be_right(self, num_replicas: int, num_rows: int) -> bool:
        """Whether numbers in the program may make up for the excess.

        Such a program is right for one number of replicas, or of rows, and for no other.
        """
        # 2 is hardly ever the number of rows: each derivative of a square has it.
        powers = (-1, 0, 1) if num_rows != 2 else (0,)
        right = [
            float(num_rows) ** i * float(num_replicas) ** j
            for i, j in itertools.product(powers, (-1, 0, 1))
            if i - j == self.excess
        ]
        of_loss = [
            [x.number for x in some if not x.of_rows] for some in (self.factors, self.before_sum)
        ]
        both = of_loss[0] + of_loss[1]
        found = [*both, *map(math.prod, (*of_loss, both))]
        # A division inside of a square is in its derivative twice.
        of_rows = [x.number for x in self.factors + self.before_sum if x.of_rows]
        found += [x for x in of_rows if of_rows.count(x) == 1]
        if any(abs(abs(x) / y - 1) < 1e-4 for x in found for y in right):
            return True
        return any(
            _is_share(num_replicas, abs(x.number))
            for x in self.before_sum
            if not x.of_rows and not x.divides
        )


def _is_share(n: int, factor: float) -> bool:
    """Whether a number is hardly anything but a rounder one divided by n, such as 0.3 / 8."""
    digits, without = (f"{x:.4e}".partition("e")[0].rstrip("0.") for x in (factor, factor * n))
    return factor < 1 and len(without) < len(digits)
