"""Values that are not those of one device, and whether numbers in the program make up for them."""

import dataclasses
import itertools
import math
from fractions import Fraction


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
    factors: tuple[float, ...] = ()
    before_sum: tuple[float, ...] = ()
    mixed: bool = False
    is_draw: bool = False

    def may_be_right(self, num_replicas: int, num_rows: int) -> bool:
        """Whether numbers in the program may make up for the excess.

        Such a program is right for one number of replicas, or of rows, and for no other.
        """
        right = [
            float(num_rows) ** i * float(num_replicas) ** j
            for i, j in itertools.product((-1, 0, 1), (-1, 0, 1))
            if i - j == self.excess
        ]
        factors = [abs(x) for x in self.factors + self.before_sum]
        products = (
            math.prod(some)
            for k in range(1, len(factors) + 1)
            for some in itertools.combinations(factors, k)
        )
        if any(abs(x / y - 1) < 1e-4 for x in products for y in right):
            return True
        return any(_may_contain(num_replicas, x) for x in factors[len(self.factors) :])


def _may_contain(n: int, factor: float) -> bool:
    """Whether a factor of a loss may contain 1 / n.

    The inverse of a multiple of n may, and a number that has fewer digits if it is multiplied by n,
    such as 0.025 with 4 replicas. A count of features may not, nor 0.9.
    """
    whole = 1 / factor if factor < 1 else factor
    if abs(whole - round(whole)) < 1e-4:
        return factor < 1 and round(whole) % n == 0
    digits, without = (f"{x:.4e}".partition("e")[0].rstrip("0.") for x in (factor, factor * n))
    return len(without) < len(digits) or without == "1"
