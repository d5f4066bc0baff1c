"""What is known of a value on the way from a mean over rows to a sum over replicas.

Everything here is what can be said for certain of one trace of full batches; where nothing is
known, nothing is said.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jax.extend import core


@dataclasses.dataclass(frozen=True)
class RowDim:
    """A dim that counts rows of a batch.

    Attributes:
        rows: How many; fewer than the replica has where they were split in parts.
        total: How many the replica has.
        others: What else the dim counts, where others were merged into it.
    """

    rows: int
    total: int
    others: int = 1


@dataclasses.dataclass(frozen=True)
class Division:
    """Where 1 is divided by a number that is known: in the backward pass of a mean.

    Attributes:
        divisor: The number.
        by_mean: Whether JAX's own mean divides, and so by the size of what it sums.
        eqn: The equation.
    """

    divisor: int
    by_mean: bool
    eqn: core.JaxprEqn = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known of one value.

    Attributes:
        rows: Which of its dims count rows.
        number: What all its elements are.
        division: The division that it is proportional to: of a number (1 / divisor, then dims were
            broadcast), or of a share.
        late: Of a number with a division: the dims that were broadcast since.
        is_share: Whether it is linear in the gradient of the mean that `division` is of.
        pending: What a number or share was divided by since, and not yet broadcast to.
        scale: What it was multiplied by since, of factors below 1.
        parts: In how many parts the rows of a share were split.
        is_uniform: Whether all its elements are one number, which need not be known.
        is_communicated: Whether it depends on what other replicas have.
        factor: The number that it is something else times.
        sums: The sums over replicas that it is linear in.
        depends: The sums over replicas that it depends on.
        is_scaled: Whether such a sum was multiplied by something.
        is_doubtful: Whether that may have been the reciprocal of the number of replicas.
    """

    rows: Mapping[int, RowDim] = dataclasses.field(default_factory=dict)
    number: float | None = None
    division: Division | None = None
    late: frozenset[int] = frozenset()
    is_share: bool = False
    pending: int = 1
    scale: float = 1.0
    parts: int = 1
    is_uniform: bool = False
    is_communicated: bool = False
    factor: float | None = None
    sums: frozenset[int] = frozenset()
    depends: frozenset[int] = frozenset()
    is_scaled: bool = False
    is_doubtful: bool = False

    @property
    def is_same_everywhere(self) -> bool:
        """Whether its elements are one number, known or not."""
        return self.is_uniform or self.number is not None

    def without_division(self) -> "Fact":
        """The same, of which no more is said than rows, numbers and sums."""
        return dataclasses.replace(
            self, division=None, late=frozenset(), is_share=False, pending=1, scale=1.0, parts=1
        )

    def without_sums(self) -> "Fact":
        """The same, which may depend on a sum but is no multiple of one."""
        none: frozenset[int] = frozenset()
        return dataclasses.replace(self, sums=none, is_scaled=False, is_doubtful=False)

    def move_dims(self, places: Mapping[int, int], new: Set[int] = frozenset()) -> "Fact":
        """The same with its dims at other places; of those without a place nothing is known.

        Args:
            places: Where dims go.
            new: The dims that are broadcast.
        """
        rows = {places[i]: x for i, x in self.rows.items() if i in places}
        late = frozenset(places[i] for i in self.late if i in places) | frozenset(new)
        return dataclasses.replace(self, rows=rows, late=late if self.division else frozenset())


NOTHING = Fact(is_communicated=True)
"""Of a value that is not followed."""


def combine(facts: Sequence[Fact]) -> Fact:
    """What holds for any elementwise function of values of one shape, or of scalars."""
    depends: frozenset[int] = frozenset().union(*(x.depends for x in facts))
    return Fact(
        rows=merge_rows(facts),
        is_uniform=all(x.is_same_everywhere for x in facts),
        is_communicated=any(x.is_communicated for x in facts),
        depends=depends,
    )


def merge_rows(facts: Sequence[Fact]) -> dict[int, RowDim]:
    """The row dims of values of one shape; none where they contradict each other."""
    merged: dict[int, RowDim] = {}
    for fact in facts:
        for dim, rows in fact.rows.items():
            if merged.setdefault(dim, rows) != rows:
                return {}
    return merged


def join(one: Fact, other: Fact) -> Fact:
    """What holds whichever of two values it is, as of a branch or of a turn of a loop."""
    if one == other:
        return one
    joined = combine((one, other))
    if other.number == 0 and not other.division:
        one, other = other, one
    zero = one.number == 0 and not one.division
    rows = other.rows if zero else {i: x for i, x in one.rows.items() if other.rows.get(i) == x}
    joined = dataclasses.replace(
        joined,
        rows=rows,
        is_uniform=False,
        sums=one.sums | other.sums,
        is_scaled=one.is_scaled or other.is_scaled,
        is_doubtful=one.is_doubtful or other.is_doubtful,
    )
    if other.is_share and (zero or one.is_share):
        return take_share(joined, [x for x in (one, other) if x.is_share])
    return joined


def take_share(into: Fact, shares: Sequence[Fact]) -> Fact:
    """`into` as a share, of the sum of some."""
    first = min(shares, key=lambda x: (x.pending, x.scale))
    return dataclasses.replace(
        into,
        division=first.division,
        is_share=True,
        pending=first.pending,
        scale=min(x.scale for x in shares),
        parts=first.parts,
    )


def link(
    number: Fact, sizes: Sequence[int], labelled: Fact, rows: Mapping[int, RowDim], replicas: int
) -> Fact | None:
    """The share that a divided number is, where it meets values that have rows.

    That the number was broadcast along the rows after the division says that the rows are summed
    before it, forward; that its divisor is how many they are (or how many elements) says that it is
    their mean. A divisor by which one might mean the rows of all replicas is none.

    Args:
        number: What was divided.
        sizes: Of its dims.
        labelled: What it meets.
        rows: Which dims of the number then count rows.
        replicas: How many replicas there are.
    """
    division = number.division
    if division is None or number.is_share or not rows or labelled.is_communicated:
        return None
    if labelled.is_same_everywhere or labelled.is_share or not rows.keys() <= number.late:
        return None
    count = math.prod(x.rows for x in rows.values())
    totals = {x.total for x in rows.values()}
    if len(totals) > 1 or count < 2 or max(totals) % count:
        return None
    others = math.prod(x.others for x in rows.values())
    others *= math.prod(sizes[i] for i in number.late - rows.keys())
    of_all = division.divisor == count * others and (division.by_mean or others % replicas)
    if division.divisor != count and not of_all:
        return None
    shared = combine((number, labelled))
    shared = dataclasses.replace(shared, rows=dict(labelled.rows), is_uniform=False)
    return dataclasses.replace(take_share(shared, [number]), parts=max(totals) // count)


def forget(fact: Fact) -> Fact:
    """Only the rows of a value, and what it depends on."""
    plain = fact.without_division().without_sums()
    return dataclasses.replace(plain, number=None, factor=None)


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a value of a program."""
    return atom.aval.shape
