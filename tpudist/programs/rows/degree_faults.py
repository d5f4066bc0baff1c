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
        # 2 is hardly ever the number of rows: each derivative of a square has it.
        powers = (-1, 0, 1) if num_rows != 2 else (0,)
        right = [
            float(num_rows) ** i * float(num_replicas) ** j
            for i, j in itertools.product(powers, (-1, 0, 1))
            if i - j == self.excess
        ]
        factors = self.factors + self.before_sum
        # Other products of many are often a power of n by chance.
        together = [*itertools.combinations(factors, 2)]
        for some in (self.factors, self.before_sum):
            ends = itertools.combinations(range(len(some) + 1), 2)
            together += [some[start:end] for start, end in ends]
        products = [abs(math.prod(some)) for some in together]
        if any(abs(x / y - 1) < 1e-4 for x in products for y in right):
            return True
        return any(_may_contain(num_replicas, abs(x)) for x in self.before_sum)


def _may_contain(n: int, factor: float) -> bool:
    """Whether a factor of a loss may contain 1 / n.

    The inverse of a multiple of n may, and a number that has fewer digits if it is multiplied by n,
    such as 0.025 with 4 replicas. A count of features may not, nor 0.9, nor the 1.25 of a dropout.
    """
    if factor >= 1:
        return False
    whole = 1 / factor
    if abs(whole - round(whole)) < 1e-4:
        return round(whole) % n == 0
    digits, without = (f"{x:.4e}".partition("e")[0].rstrip("0.") for x in (factor, factor * n))
    return len(without) < len(digits) or without == "1"
