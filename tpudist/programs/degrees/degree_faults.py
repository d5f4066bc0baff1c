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
        # A number in the program has no degree, so the excess ignores that a user may have written
        # it for the number of rows or replicas. A factor rows**i * replicas**j would add i to the
        # degree in the rows and j to the degree in the replicas, so it would add j - i to the
        # excess. It corrects the value if the sum is 0.
        # A factor 2 is hardly ever the number of rows: each derivative of a square has it.
        powers_of_rows = (-1, 0, 1) if num_rows != 2 else (0,)
        corrections = [
            float(num_rows) ** i * float(num_replicas) ** j
            for i, j in itertools.product(powers_of_rows, (-1, 0, 1))
            if self.excess + j - i == 0
        ]
        after_sum, before_sum = (
            [x.number for x in factors if not x.of_rows]
            for factors in (self.factors, self.before_sum)
        )
        # One factor may correct the value, or all of them together.
        products = map(math.prod, (after_sum, before_sum, after_sum + before_sum))
        candidates = [*after_sum, *before_sum, *products]
        # A number that occurs twice comes from a division inside a square, not from the loss.
        of_rows = [x.number for x in self.factors + self.before_sum if x.of_rows]
        candidates += [x for x in of_rows if of_rows.count(x) == 1]
        # 1e-4: a candidate is a float32 number, or a product of several.
        if any(abs(abs(x) / y - 1) < 1e-4 for x in candidates for y in corrections):
            return True
        # A user may have divided a weight of the loss by the number of replicas before passing it.
        return any(
            _is_share(num_replicas, abs(x.number))
            for x in self.before_sum
            if not x.of_rows and not x.divides
        )


def _is_share(num_replicas: int, factor: float) -> bool:
    """Returns whether a factor is probably a number with fewer digits divided by `num_replicas`."""
    # For 8 replicas, 0.0375 has the digits "3.75", and 0.0375 * 8 = 0.3 has only "3". A user's
    # number may look so by chance, such as 0.125: then a warning is missing, but none is wrong.
    digits, digits_of_multiple = (
        f"{x:.4e}".partition("e")[0].rstrip("0.") for x in (factor, factor * num_replicas)
    )
    return factor < 1 and len(digits_of_multiple) < len(digits)
