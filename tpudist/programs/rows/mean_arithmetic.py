"""What arithmetic does to what is known of a value on the way from a mean to a sum.

Factors decide: of a gradient that is multiplied by what may be 1 / replicas nothing more is said.
"""

import dataclasses
import inspect
import math
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from tpudist.programs.rows.mean_facts import (
    Division,
    Fact,
    combine,
    forget,
    link,
    shape_of,
    take_share,
)

_MEAN = inspect.getfile(jnp.mean)


def is_of_mean(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is of JAX's own mean, forward or backward."""
    traceback = getattr(eqn.source_info, "traceback", None)
    return any(
        x.function_name in ("mean", "_mean") and x.file_name == _MEAN
        for x in (traceback.frames if traceback is not None else ())
    )


class SumsSeen:
    """What becomes of the sums over replicas: told by the rules, asked at the end.

    Attributes:
        divided: Those that are divided by the number of replicas, or by what may be it.
        used: Those that are a part of something new, after they were scaled.
    """

    def __init__(self):
        """Nothing yet."""
        self.divided: set[int] = set()
        self.used: set[int] = set()


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The rules of elementwise functions, for so many replicas."""

    replicas: int
    seen: SumsSeen

    def elementwise(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """Of which nothing is known but the rows."""
        return combine(facts)

    def linear(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """A function of one value that keeps what it is proportional to."""
        fact = facts[0]
        if eqn.primitive.name != "neg" or fact.number is None:
            return dataclasses.replace(fact, factor=None)
        return dataclasses.replace(fact, number=-fact.number, factor=None)

    def convert(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """A cast: to integers it is not linear."""
        is_float = jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact)
        return facts[0] if is_float else forget(facts[0])

    def power(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """A power, of which only the first is linear."""
        return facts[0] if eqn.params["y"] == 1 else combine(facts)

    def multiply(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """A product, which is linear in one of two."""
        one, other = facts
        if _is_factor(one) and not (_is_factor(other) and abs(one.number or 0) == 1):
            one, other = other, one
        elif (other.is_share or other.sums) and not (one.is_share or one.sums):
            one, other = other, one
        return self._scale(eqn, one, other, divides=False)

    def divide(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """A quotient, which is linear in what is divided."""
        return self._scale(eqn, *facts, divides=True)

    def _scale(self, eqn: core.JaxprEqn, x: Fact, by: Fact, *, divides: bool) -> Fact:
        """`x` times `by`, or divided by it."""
        product = combine((x, by))
        result: Any = eqn.outvars[0].aval
        if not jnp.issubdtype(result.dtype, jnp.inexact):
            return product  # quotients of integers are rounded
        if by.number is not None and not by.division:
            if not by.number:
                return product if divides else dataclasses.replace(product, number=0.0)
            factor = 1 / by.number if divides else by.number
            product = self._scale_by_number(eqn, product, x, factor, divides)
        elif x.division and not by.is_communicated and not by.is_same_everywhere:
            product = self._scale_by_array(eqn, product, x, by, divides)
        elif not divides and by.division and by.number is not None and x.number is None:
            sizes = shape_of(eqn.outvars[0])
            product = link(by, sizes, x, x.rows, self.replicas) or product
        if x.sums and not by.sums:
            product = self._scale_sum(product, x, by, divides)
        return product

    def _scale_by_array(
        self, eqn: core.JaxprEqn, product: Fact, x: Fact, by: Fact, divides: bool
    ) -> Fact:
        if not x.is_share:
            return link(x, shape_of(eqn.outvars[0]), by, by.rows, self.replicas) or product
        return product if by.is_share else take_share(product, [x])

    def _scale_by_number(
        self, eqn: core.JaxprEqn, product: Fact, x: Fact, factor: float, divides: bool
    ) -> Fact:
        """What stays proportional to a division if no factor can stand for 1 / replicas."""
        size = abs(factor)
        whole = round(1 / size)
        is_whole = whole >= 2 and math.isclose(whole * size, 1, rel_tol=1e-6)
        scaled = dataclasses.replace(product, factor=factor)
        if x.number is not None:
            scaled = dataclasses.replace(scaled, number=x.number * factor)
        if x.division is None:
            if x.number is not None and abs(x.number) == 1 and is_whole:
                division = Division(whole, is_of_mean(eqn), eqn)
                scaled = dataclasses.replace(scaled, division=division)
            return scaled
        scale, pending = x.scale, x.pending
        if size == 0.5:
            scale *= size
            if 1 / scale >= self.replicas:
                return scaled
        elif size < 1:
            certain = divides and (whole % self.replicas or is_of_mean(eqn))
            if not (is_whole and certain and pending == 1):
                return scaled
            pending = whole
        return dataclasses.replace(
            scaled,
            division=x.division,
            late=x.late,
            is_share=x.is_share,
            pending=pending,
            scale=scale,
            parts=x.parts,
        )

    def _scale_sum(self, product: Fact, x: Fact, by: Fact, divides: bool) -> Fact:
        """A sum over replicas times something, which may divide it by their number."""
        doubtful, scaled = x.is_doubtful, True
        if by.number:
            factor = 1 / by.number if divides else by.number
            parts = 1 / (self.replicas * factor)
            whole = factor > 0 and math.isclose(parts, round(parts), rel_tol=1e-6) and parts > 0.5
            if whole and (divides or math.log2(round(parts)).is_integer()):
                self.seen.divided |= x.sums
            doubtful = doubtful or whole
            scaled = x.is_scaled or abs(factor) != 1
        elif by.is_same_everywhere:
            # A number of all replicas' rows, say. What depends on the sum itself, such as its norm,
            # is none.
            if by.is_communicated and not by.depends:
                self.seen.divided |= x.sums
            doubtful = doubtful or not by.depends
        return dataclasses.replace(product, sums=x.sums, is_scaled=scaled, is_doubtful=doubtful)

    def add(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """A sum or difference: what it is linear in is in there, whatever else is."""
        one, other = facts
        total = combine(facts)
        negative = eqn.primitive.name == "sub"
        if one.number is not None and other.number is not None:
            number = one.number - other.number if negative else one.number + other.number
            total = dataclasses.replace(total, number=number)
        for x, zero in ((one, other), (other, one)):
            if x.number is not None and x.division and zero.number == 0 and not zero.division:
                total = dataclasses.replace(x, number=total.number, rows=total.rows)
        shares = [x for x in facts if x.is_share]
        if shares:
            total = take_share(total, shares)
        for x, rest in ((one, other), (other, one)):
            if not x.sums or rest.sums:
                continue
            average = x.factor is not None and rest.factor is not None
            average = average and math.isclose(x.factor + rest.factor, 1, rel_tol=1e-5)  # type: ignore
            if average or (x.is_scaled and not x.is_doubtful):
                self.seen.used |= x.sums
        return dataclasses.replace(
            total,
            sums=one.sums | other.sums,
            is_scaled=one.is_scaled or other.is_scaled,
            is_doubtful=one.is_doubtful or other.is_doubtful,
        )

    def select(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """A choice: linear where all cases are, or zero."""
        which, cases = facts[0], facts[1:]
        chosen = combine(facts)
        sums: frozenset[int] = frozenset().union(*(x.sums for x in cases))
        chosen = dataclasses.replace(
            chosen,
            is_uniform=chosen.is_uniform and which.is_same_everywhere,
            sums=sums,
            is_scaled=any(x.is_scaled for x in cases),
            is_doubtful=any(x.is_doubtful for x in cases),
        )
        others = [x for x in cases if x.number != 0 or x.division]
        if not others:
            return dataclasses.replace(chosen, number=0.0)
        if all(x.is_share for x in others):
            return take_share(chosen, others)
        if len(others) == 1 and others[0].number is not None and which.rows:
            sizes = shape_of(eqn.outvars[0])
            return link(others[0], sizes, which, which.rows, self.replicas) or chosen
        return chosen


def _is_factor(fact: Fact) -> bool:
    """Whether it is a number and nothing more."""
    return fact.number is not None and not fact.division
