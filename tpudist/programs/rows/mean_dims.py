"""What moves, adds and drops dims, and how rows are found again afterwards."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.extend import core

from tpudist.programs.rows.mean_facts import Fact, RowDim, combine, forget, shape_of, take_share

_UNKNOWN = {"number": None, "division": None, "late": frozenset(), "factor": None}


def broadcast(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """Dims are added; those of a mean over features are no dims of the division's own."""
    fact, (x, *_) = facts[0], eqn.invars
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    kept = {i: int(p) for i, p in enumerate(places) if shape_of(x)[i] == shape[p]}
    new = {i for i in range(len(shape)) if i not in kept.values() and shape[i] != 1}
    if fact.pending > 1:
        whole = math.prod(shape[i] for i in new) == fact.pending
        fact = dataclasses.replace(fact, pending=1 if whole else fact.pending)
        return fact.move_dims(kept)
    return fact.move_dims(kept, new)


def reshape(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """Dims are merged or split."""
    if eqn.params.get("dimensions") is not None:
        return combine(facts)
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    fact, rows, late = facts[0], {}, set()
    for old, new in _groups(before, after):
        if all(i in fact.late for i in old):
            late |= set(new)
        labelled = [fact.rows[i] for i in old if i in fact.rows]
        rows |= _regroup(labelled, [before[i] for i in old], [(i, after[i]) for i in new])
    late = frozenset(late) if fact.division else frozenset()
    return dataclasses.replace(fact, rows=rows, late=late)


def transpose(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """Dims are permuted."""
    return facts[0].move_dims({old: new for new, old in enumerate(eqn.params["permutation"])})


def squeeze(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """Dims of one element are left out."""
    return _drop(facts[0], eqn, eqn.params["dimensions"])


def reduce_sum(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """A sum over dims: a share stays one, a number does not."""
    fact = _drop(facts[0], eqn, eqn.params["axes"])
    return fact if fact.is_share else dataclasses.replace(fact, **_UNKNOWN)


def reduce(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """Another reduction of dims."""
    return _drop(forget(facts[0]), eqn, eqn.params["axes"])


def keep(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """Dims stay or are cut; a share must have all its rows, and padding is zero."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    fact = facts[0].move_dims({i: i for i, n in enumerate(before) if after[i] == n})
    fact = dataclasses.replace(fact, is_communicated=any(x.is_communicated for x in facts))
    pads = eqn.primitive.name == "pad"
    if (fact.is_share and fact.rows != facts[0].rows) or (pads and facts[1].number != 0):
        return forget(fact)
    return fact if not pads else dataclasses.replace(fact, number=None, factor=None)


def along(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """A scan of JAX's along one dim, which may not be one of rows."""
    fact = facts[0] if eqn.primitive.name == "cumsum" and facts[0].is_share else forget(facts[0])
    return combine([]) if eqn.params["axis"] in fact.rows else fact


def windows(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """What happens in windows, of one row each."""
    params = eqn.params
    still = {
        i
        for i, size in enumerate(params["window_dimensions"])
        if size == params["window_strides"][i] == 1 and tuple(params["padding"][i]) == (0, 0)
    }
    is_linear = eqn.primitive.name in ("reduce_window_sum", "select_and_scatter_add")
    fact = facts[0] if is_linear and facts[0].is_share else forget(facts[0])
    moved = fact.move_dims({i: i for i in still})
    return moved if moved.rows == fact.rows else forget(moved)


def concatenate(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """Values behind each other along a dim that counts no rows."""
    return _join_along(eqn.params["dimension"], facts)


def stack(eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
    """Values behind each other along a dim of its own."""
    axis, rank = eqn.params["axis"], len(shape_of(eqn.invars[0]))
    places = {i: i + (i >= axis) for i in range(rank)}
    return _join_along(axis, [x.move_dims(places) for x in facts])


def _join_along(axis: int, facts: list[Fact]) -> Fact:
    parts = [dataclasses.replace(x, rows=_without(x.rows, axis)) for x in facts]
    joined = dataclasses.replace(
        combine(parts),
        is_uniform=False,
        sums=frozenset().union(*(x.sums for x in facts)),
        is_scaled=any(x.is_scaled for x in facts),
        is_doubtful=any(x.is_doubtful for x in facts),
    )
    shares = [x for x in facts if x.number != 0 or x.division]
    whole = all(x.is_share and axis not in x.rows for x in shares)
    return take_share(joined, shares) if shares and whole else joined


def _without(rows: Mapping[int, RowDim], dim: int) -> dict[int, RowDim]:
    return {i: x for i, x in rows.items() if i != dim}


def _drop(fact: Fact, eqn: core.JaxprEqn, dims: Sequence[int]) -> Fact:
    rest = [i for i in range(len(shape_of(eqn.invars[0]))) if i not in dims]
    return fact.move_dims({old: new for new, old in enumerate(rest)})


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Which dims become which in a reshape: the smallest groups of the same size."""
    if 0 in before:
        return []
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [], []
        if i < len(before):
            old, i = [i], i + 1
        if j < len(after):
            new, j = [j], j + 1
        while (left := math.prod(before[k] for k in old)) != (
            right := math.prod(after[k] for k in new)
        ):
            if left < right:
                old, i = [*old, i], i + 1
            else:
                new, j = [*new, j], j + 1
        groups.append((old, new))
    return groups


def _regroup(
    labelled: Sequence[RowDim], sizes: Sequence[int], new: Sequence[tuple[int, int]]
) -> dict[int, RowDim]:
    """The row dims among new dims (each its place and size) that are made of old ones."""
    wide = [(i, size) for i, size in new if size != 1]
    if not labelled or not wide:
        return {}
    total, *more = {x.total for x in labelled}
    rows = math.prod(x.rows for x in labelled)
    others = math.prod(sizes) // rows
    if more:
        return {}
    if len(wide) == 1:
        return {wide[0][0]: RowDim(rows, total, others)}
    if others == 1:
        return {i: RowDim(size, total) for i, size in wide}
    # Merged dims taken apart again. Which ones came first is not kept, so sizes must say it.
    if len(labelled) == 1 and wide[0][1] == rows != others:
        return {wide[0][0]: RowDim(rows, total)}
    return {}
