"""Finds gradients of a mean over each replica's own rows that are summed over the replicas.

n replicas whose losses are means over their own rows have gradients as large as that of one device
with all rows; their sum is n times as large. What divides and what sums are far apart in a program:
the mean is a division of the 1 that a backward pass begins with, before it is broadcast to the
rows, and all that follows is linear in it, up to a `psum`.

So one trace is followed once, with what is known of each value (`mean_facts`), by the rules of each
primitive (`mean_rules`, `mean_arithmetic`, `mean_dims`). Only what is certain is found: the divisor
is the number of rows (or of elements, where JAX's own mean divides); no factor on the way can be
1 / n; and what is summed is given to `tpudist.Optimizer`, or scaled and added to something, and
divided by n nowhere. That a divisor is as large as the number of rows may be chance still: who
warns has the function traced for another number, and looks whether the divisor follows.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.references import is_reference
from tpudist.programs.rows.mean_arithmetic import SumsSeen
from tpudist.programs.rows.mean_facts import NOTHING, Division, Fact, RowDim, join
from tpudist.programs.rows.mean_rules import Rules
from tpudist.programs.rows.user_lines import users_line_of
from tpudist.xla.mesh import REPLICA_AXIS

OPTIMIZER_SCOPE = "tpudist.Optimizer"
"""The `jax.named_scope` in which an optimizer sums gradients that it then applies."""

_MAX_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class LocalMean:
    """A mean over one replica's rows whose gradient is summed over the replicas.

    Attributes:
        divisor: How many elements the mean is of.
        where: The line of the mean, as `file:line`; empty if it is not known.
        summed: The line of the sum.
    """

    divisor: int
    where: str
    summed: str


def find(closed: Any, row_dims: Mapping[int, int], replicas: int) -> LocalMean | None:
    """The first such mean in the program of one replica, or None.

    Args:
        closed: The program, for full batches.
        row_dims: Of the inputs that are batches: which dim has the rows.
        replicas: How many replicas there are.
    """
    walk = _Walk(replicas)
    facts = []
    for i, x in enumerate(closed.jaxpr.invars):
        size = x.aval.shape[row_dims[i]] if i in row_dims else 0
        rows = {row_dims[i]: RowDim(size, size)} if size > 1 else {}
        facts.append(Fact(rows=rows, is_uniform=_is_single(x)))
    # What a constant holds is not looked at: it may be 1 / replicas.
    walk.jaxpr(closed.jaxpr, [NOTHING] * len(closed.jaxpr.constvars), facts)
    return walk.result()


@dataclasses.dataclass
class _Sum:
    division: Division
    eqn: core.JaxprEqn
    calls: tuple[core.JaxprEqn, ...]


class _Walk:
    def __init__(self, replicas: int):
        self.replicas = replicas
        self.seen = SumsSeen()
        self.rules = Rules(replicas, self.seen)
        self.numbers: dict[tuple[int, int], int] = {}
        self.sums: dict[int, _Sum] = {}
        self.calls: list[core.JaxprEqn] = []
        self.calls_of: dict[int, tuple[core.JaxprEqn, ...]] = {}
        self.trying = 0  # in rounds of loops that may know too much

    def result(self) -> LocalMean | None:
        """The first sum that is found for certain."""
        for number in sorted(self.seen.used - self.seen.divided):
            if number in self.sums:
                found = self.sums[number]
                division = found.division.eqn
                where = _line(division, self.calls_of[id(division)])
                return LocalMean(found.division.divisor, where, _line(found.eqn, found.calls))
        return None

    def jaxpr(self, jaxpr: core.Jaxpr, consts: Sequence[Fact], args: Sequence[Fact]) -> list[Fact]:
        """What is known of a jaxpr's outputs, given what is of its inputs."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            facts = [_literal(x) if isinstance(x, core.Literal) else env[x] for x in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, facts), strict=True))
        return [_literal(x) if isinstance(x, core.Literal) else env[x] for x in jaxpr.outvars]

    def equation(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Sequence[Fact]:
        name = eqn.primitive.name
        if name in ("psum", "psum_invariant"):
            return self._psum(eqn, facts)
        if any(map(is_reference, (*eqn.invars, *eqn.outvars))):
            return self._lose(eqn, facts)
        if name.startswith("scatter"):
            return self.rules.apply(eqn, facts)
        structure = jaxprs.structure_of(eqn)
        if isinstance(structure, jaxprs.Call) and structure.copies == 1:
            self.calls.append(eqn)
            try:
                return self._call(structure.body, facts)
            finally:
                self.calls.pop()
        if isinstance(structure, jaxprs.Cond):
            branches = [self._call(body, facts[1:]) for body in structure.bodies]
            return [functools.reduce(join, outs) for outs in zip(*branches, strict=True)]
        if isinstance(structure, jaxprs.Scan):
            return self._scan(structure, facts)
        if structure is not None or name in _COLLECTIVES:
            return self._lose(eqn, facts)
        results = self.rules.apply(eqn, facts)
        if any(x.division is not None and x.division.eqn is eqn for x in results):
            self.calls_of.setdefault(id(eqn), tuple(self.calls))
        return results

    def _call(self, body: core.Jaxpr, facts: Sequence[Fact]) -> list[Fact]:
        return self.jaxpr(body, [NOTHING] * len(body.constvars), facts)

    def _lose(self, eqn: core.JaxprEqn, facts: Sequence[Fact]) -> list[Fact]:
        """What holds where it is not known what an equation does: it may divide."""
        for fact in facts:
            self.seen.divided |= fact.sums
        depends: frozenset[int] = frozenset().union(*(x.depends for x in facts))
        nothing = dataclasses.replace(NOTHING, depends=depends)
        return [dataclasses.replace(nothing, is_uniform=_is_single(x)) for x in eqn.outvars]

    def _psum(self, eqn: core.JaxprEqn, facts: Sequence[Fact]) -> list[Fact]:
        params = eqn.params
        whole = tuple(params["axes"]) == (REPLICA_AXIS,) and not params.get("axis_index_groups")
        if not whole:
            return self._lose(eqn, facts)
        results = []
        for i, (fact, variable) in enumerate(zip(facts, eqn.outvars, strict=True)):
            summed = dataclasses.replace(NOTHING, is_uniform=_is_single(variable))
            if fact.number is not None:
                number = fact.number * self.replicas
                summed = dataclasses.replace(summed, number=number, is_communicated=False)
            elif self._is_of_mean(fact):
                assert fact.division is not None, "a share has one"
                number = self.numbers.setdefault((id(eqn), i), len(self.numbers))
                if not self.trying:
                    self.sums[number] = _Sum(fact.division, eqn, tuple(self.calls))
                    if OPTIMIZER_SCOPE in str(eqn.source_info.name_stack):
                        self.seen.used.add(number)
                own = frozenset((number,))
                summed = dataclasses.replace(summed, sums=own, depends=own)
            results.append(summed)
        return results

    def _is_of_mean(self, fact: Fact) -> bool:
        """Whether it is a gradient of a mean, of which no factor and no dim of rows is left."""
        if not fact.is_share or fact.rows:
            return False
        # The gradients of parts of a batch may be averaged in turn, as those of microbatches are.
        return fact.pending in (1, fact.parts)

    def _scan(self, scan: jaxprs.Scan, facts: list[Fact]) -> list[Fact]:
        consts = facts[: scan.num_consts]
        carry = facts[scan.num_consts : scan.num_consts + scan.num_carry]
        xs = [_one_of(x) for x in facts[scan.num_consts + scan.num_carry :]]
        self.trying += 1
        used = set(self.seen.used)
        # Each round knows less of the carry than the one before; one that knows no more than it is
        # told by its own turn holds for all turns.
        for _ in range(_MAX_ROUNDS):
            out = self._call(scan.body, [*consts, *carry, *xs])
            joined = [join(a, b) for a, b in zip(carry, out[: len(carry)], strict=True)]
            if joined == carry:
                break
            carry = joined
        else:
            carry = [NOTHING] * len(carry)
        self.trying -= 1
        self.seen.used.intersection_update(used)
        out = self._call(scan.body, [*consts, *carry, *xs])
        stacked = [_stack(x) for x in out[len(carry) :]]
        return [*carry, *stacked]


# What these give depends on other replicas.
_COLLECTIVES = frozenset(
    "all_gather all_gather_invariant all_to_all axis_index pmax pmin ppermute reduce_scatter "
    "psum_scatter ragged_all_to_all".split()
)


def _literal(literal: core.Literal) -> Fact:
    value = np.asarray(literal.val)
    if value.size != 1 or value.dtype.kind not in "fiu":
        return Fact(is_uniform=value.size == 1)
    return Fact(number=float(value.reshape(())), is_uniform=True)


def _is_single(variable: Any) -> bool:
    return math.prod(getattr(variable.aval, "shape", ())) == 1


def _one_of(fact: Fact) -> Fact:
    """What a turn of a loop sees of what it goes along."""
    rank = 1 + max((*fact.rows, *fact.late), default=0)
    one = fact.move_dims({i: i - 1 for i in range(1, rank)})
    # One row of a share: how many of them are summed is no longer known.
    return one.without_division() if fact.is_share and 0 in fact.rows else one


def _stack(fact: Fact) -> Fact:
    rank = 1 + max((*fact.rows, *fact.late), default=0)
    return fact.move_dims({i: i + 1 for i in range(rank)})


def _line(eqn: core.JaxprEqn, calls: Sequence[core.JaxprEqn]) -> str:
    """The user's line of an equation, or of what calls it; empty where there is none."""
    return next(filter(None, map(users_line_of, (eqn, *reversed(calls)))), "")
