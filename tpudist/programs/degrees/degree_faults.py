"""Values that one device would not compute, and whether numbers in the program correct them."""

import dataclasses
import itertools
import math
from fractions import Fraction

from tpudist.programs.degrees.degree import Factor


@dataclasses.dataclass(frozen=True)
class Fault:
    """A value that is added to state, and that one device with all rows would not compute.

    Attributes:
        excess: Power of the number of replicas by which the value is too large. 0 for a mean over
            replicas of means over rows, which is correct for equal numbers of rows per replica.
        counted: The line that divides by rows or replicas; empty if no line does. If `mixed`, the
            line of the addition.
        summed: The line that sums over replicas.
        sources: The state inputs that the value depends on, as bits.
        factors: The numbers that the value was multiplied by after the sum.
        before_sum: The numbers that it was multiplied by before the sum.
        mixed: Whether only one of two addends is too large.
        is_draw: Whether the value is a draw of random numbers for each row that is equal on all
            replicas. The other attributes have no meaning then.
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
        """Returns whether numbers in the program may correct the excess.

        Such a program is correct for one number of replicas or of rows, and for no other.
        """
        # A factor 2 is hardly ever the number of rows: each derivative of a square has it.
        powers = (-1, 0, 1) if num_rows != 2 else (0,)
        corrections = [
            float(num_rows) ** i * float(num_replicas) ** j
            for i, j in itertools.product(powers, (-1, 0, 1))
            if i - j == self.excess
        ]
        after, before = (
            [x.number for x in factors if not x.of_rows]
            for factors in (self.factors, self.before_sum)
        )
        # One factor may correct the value, or all of them together.
        numbers = [*after, *before, *map(math.prod, (after, before, after + before))]
        # A number that occurs twice comes from a division inside a square, not from the loss.
        of_rows = [x.number for x in self.factors + self.before_sum if x.of_rows]
        numbers += [x for x in of_rows if of_rows.count(x) == 1]
        # 1e-4: the numbers are float32, and a product of up to 8 of them.
        if any(abs(abs(x) / y - 1) < 1e-4 for x in numbers for y in corrections):
            return True
        return any(
            _is_share(num_replicas, abs(x.number))
            for x in self.before_sum
            if not x.of_rows and not x.divides
        )


def _is_share(n: int, factor: float) -> bool:
    """Returns whether a number is probably a shorter number divided by n, such as 0.3 / 8."""
    # 0.0375 has the digits "3.75", and 0.0375 * 8 = 0.3 has "3". A user's number may look so by
    # chance, as 0.125 does for 8 replicas: then a warning is missing, but none is wrong.
    digits, multiplied = (f"{x:.4e}".partition("e")[0].rstrip("0.") for x in (factor, factor * n))
    return factor < 1 and len(multiplied) < len(digits)
