"""What each primitive does to what is known of a value on the way from a mean to a sum.

A rule may say less than is true, never more. A primitive without a rule gives values of which
nothing is known but whether they depend on other replicas.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend import core

from tpudist.programs import elementwise
from tpudist.programs.rows import mean_dims
from tpudist.programs.rows.mean_arithmetic import Arithmetic
from tpudist.programs.rows.mean_facts import Fact, combine, link, shape_of, take_share


class Rules(Arithmetic):
    """All rules, for so many replicas."""

    def apply(self, eqn: core.JaxprEqn, facts: list[Fact]) -> list[Fact]:
        """What is known of the results of an operation."""
        name = eqn.primitive.name
        if name in _RULES:
            (variable,) = eqn.outvars
            return [_fit(_RULES[name](self, eqn, facts), variable.aval)]
        if name in _DIMS:
            (variable,) = eqn.outvars
            return [_fit(_DIMS[name](eqn, facts), variable.aval)]
        plain = dataclasses.replace(combine(facts), rows={}, is_uniform=False)
        return [_fit(plain, x.aval) for x in eqn.outvars]

    def dot(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """Products of matrices: of a share, summed over what is contracted."""
        (contracted, batch) = eqn.params["dimension_numbers"]
        shapes = [shape_of(x) for x in eqn.invars]
        free = [
            [i for i in range(len(shapes[k])) if i not in (*contracted[k], *batch[k])]
            for k in (0, 1)
        ]
        places = [{old: new for new, old in enumerate((*batch[k], *free[k]))} for k in (0, 1)]
        for i in free[1]:
            places[1][i] += len(free[0])
        moved = [fact.move_dims(places[k]) for k, fact in enumerate(facts)]
        product = dataclasses.replace(combine(moved), is_uniform=False)
        for k, (x, other) in enumerate((facts, facts[::-1])):
            if x.is_share:
                ones = other.number == 1 and not other.division
                usable = not (other.is_share or other.is_communicated)
                if usable and (ones or not other.is_same_everywhere):
                    return take_share(product, [x])
            elif x.number is not None and x.division:
                pairs = zip(
                    (*contracted[1 - k], *batch[1 - k]), (*contracted[k], *batch[k]), strict=True
                )
                rows = {j: other.rows[i] for i, j in pairs if i in other.rows}
                shared = link(x, shapes[k], other, rows, self.replicas)
                if shared is not None and len(rows) == len(other.rows):
                    return take_share(product, [shared])
        return product

    def convolve(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """Convolutions, of which each row is one of the batch or of the features."""
        lhs, rhs, out = eqn.params["dimension_numbers"]
        grouped = eqn.params["batch_group_count"] != 1 or eqn.params["feature_group_count"] != 1
        one = facts[0].move_dims({} if eqn.params["batch_group_count"] != 1 else {lhs[0]: out[0]})
        other = facts[1].move_dims({} if grouped else {rhs[0]: out[1]})
        product = dataclasses.replace(combine((one, other)), is_uniform=False)
        for x, by in (facts, facts[::-1]):
            if x.is_share and not (by.is_share or by.is_communicated or by.is_same_everywhere):
                return take_share(product, [x])
        return product

    def gather(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """Rows of a table, or an element of each row."""
        numbers = eqn.params["dimension_numbers"]
        operand, indices = facts
        shape, sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
        rank = len(shape_of(eqn.outvars[0]))
        places = _places_of_indices(rank, numbers.offset_dims)
        taken = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        kept = _places_of_windows(shape, sizes, taken, numbers.offset_dims)
        for i, j in zip(
            numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
        ):
            kept[i] = places[j]
        moved = [operand.move_dims(kept), indices.move_dims(places)]
        found = dataclasses.replace(combine(moved), is_uniform=False)
        whole = operand.is_share and len(moved[0].rows) == len(operand.rows)
        return take_share(found, [operand]) if whole else found

    def scatter_add(self, eqn: core.JaxprEqn, facts: list[Fact]) -> Fact:
        """The gradient of a gather: updates are added to what is there."""
        numbers = eqn.params["dimension_numbers"]
        operand, indices, updates = facts
        shape, sizes = shape_of(eqn.outvars[0]), shape_of(eqn.invars[2])
        places = _places_of_indices(len(sizes), numbers.update_window_dims)
        taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        windows = [1] * len(shape)
        rest = [i for i in range(len(shape)) if i not in taken]
        for i, j in zip(rest, numbers.update_window_dims, strict=True):
            windows[i] = sizes[j]
        kept = _places_of_windows(shape, windows, taken, numbers.update_window_dims)
        back = {j: i for i, j in kept.items()}
        for i, j in zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        ):
            back[places[j]] = i
        if updates.number is not None and updates.division:
            at = indices.move_dims(places)
            updates = link(updates, sizes, at, at.rows, self.replicas) or updates
        moved = (operand, updates.move_dims(back))
        total = dataclasses.replace(combine((*moved, combine([]))), is_uniform=False)
        shares = [x for x in (operand, updates) if x.is_share]
        return take_share(total, shares) if shares else total


def _fit(fact: Fact, aval: Any) -> Fact:
    """A fact about a value of this shape: of rows and numbers that it can have."""
    shape = getattr(aval, "shape", ())
    if not fact.is_uniform and math.prod(shape) == 1:
        fact = dataclasses.replace(fact, is_uniform=True)
    if any(i >= len(shape) or shape[i] != x.rows * x.others for i, x in fact.rows.items()):
        fact = dataclasses.replace(fact, rows={})
    return fact


def _places_of_indices(rank: int, windows: Sequence[int]) -> dict[int, int]:
    """Where the dims of indices are among those of what they take, or are added."""
    rest = [i for i in range(rank) if i not in windows]
    return dict(enumerate(rest))


def _places_of_windows(
    shape: Sequence[int], sizes: Sequence[int], taken: Sequence[int], windows: Sequence[int]
) -> dict[int, int]:
    """Where the dims of an operand are that are taken whole."""
    rest = [i for i in range(len(shape)) if i not in taken]
    return {i: j for i, j in zip(rest, windows, strict=True) if sizes[i] == shape[i]}


_RULES: Mapping[str, Callable[[Rules, core.JaxprEqn, list[Fact]], Fact]] = {
    **dict.fromkeys(elementwise.FUNCTIONS, Arithmetic.elementwise),
    **dict.fromkeys("neg copy copy_p reduce_precision stop_gradient".split(), Arithmetic.linear),
    "sharding_constraint": Arithmetic.linear,
    "convert_element_type": Arithmetic.convert,
    "integer_pow": Arithmetic.power,
    "mul": Arithmetic.multiply,
    "div": Arithmetic.divide,
    **dict.fromkeys(("add", "add_any", "sub"), Arithmetic.add),
    "select_n": Arithmetic.select,
    "dot_general": Rules.dot,
    "conv_general_dilated": Rules.convolve,
    "gather": Rules.gather,
    "scatter-add": Rules.scatter_add,
}
_DIMS: Mapping[str, Callable[[core.JaxprEqn, list[Fact]], Fact]] = {
    "broadcast_in_dim": mean_dims.broadcast,
    "reshape": mean_dims.reshape,
    "transpose": mean_dims.transpose,
    "squeeze": mean_dims.squeeze,
    "reduce_sum": mean_dims.reduce_sum,
    **dict.fromkeys("reduce_max reduce_min reduce_prod argmax argmin".split(), mean_dims.reduce),
    **dict.fromkeys("slice dynamic_slice pad rev".split(), mean_dims.keep),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), mean_dims.along),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max"), mean_dims.windows),
    "select_and_scatter_add": mean_dims.windows,
    "concatenate": mean_dims.concatenate,
    "stack": mean_dims.stack,
}
