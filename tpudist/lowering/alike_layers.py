"""Finds layers that a program repeats one after the other, and that one loop could compute.

A model whose layers are written out compiles each of them. `nnx.scan` and `nn.scan` compile one.
The search reports only layers for which that is possible: they have the same operations, each
multiplies the result of the layer before it, and each has weights of its own.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.equation_signature import Hashed, Signature
from tpudist.programs.jaxprs import Program

_MIN_LAYERS = 6  # fewer are not worth a change of the model
_MAX_PERIODS = 32  # candidates for the number of operations of a layer, the most frequent ones
_PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclasses.dataclass(frozen=True)
class AlikeLayers:
    """Layers of a program that have the same operations.

    Attributes:
        count: Number of layers.
        num_operations: Number of operations of each layer.
    """

    count: int
    num_operations: int


def find(program: Program) -> AlikeLayers | None:
    """Returns the layers with the most operations together; None if no layers are alike."""
    known: dict[int, Hashed] = {}
    found = [
        layers for jaxpr in _programs_in(program) if (layers := _find_in(jaxpr, known)) is not None
    ]
    return max(found, key=lambda x: x.count * x.num_operations, default=None)


def _programs_in(program: Program) -> list[core.Jaxpr]:
    opened = {id(jaxprs.open_jaxpr(program)): jaxprs.open_jaxpr(program)}
    for eqn in jaxprs.walk(program):
        for inner in jaxprs.programs_of(eqn.params.values()):
            opened[id(jaxprs.open_jaxpr(inner))] = jaxprs.open_jaxpr(inner)
    return list(opened.values())


def _find_in(jaxpr: core.Jaxpr, known: dict[int, Hashed]) -> AlikeLayers | None:
    """Returns the layers of a program, without those of the programs inside it."""
    if len(jaxpr.eqns) < _MIN_LAYERS:
        return None
    numbers: dict[Hashed, int] = {}
    kinds = np.array([numbers.setdefault(_kind(x, known), len(numbers)) for x in jaxpr.eqns])
    found = []
    for period in _find_periods(kinds):
        for start, count in _find_repetitions(kinds, period):
            blocks = [jaxpr.eqns[start + i * period :][:period] for i in range(count)]
            if _multiplies_results(*blocks[:2]) and _are_layers(jaxpr, start, blocks):
                found.append(AlikeLayers(count, period))
    # Two layers together are a period, too, and the operations of the optimizer also repeat.
    return max(found, key=lambda x: (x.count * x.num_operations, x.count), default=None)


def _kind(eqn: core.JaxprEqn, known: dict[int, Hashed]) -> Hashed:
    """Returns a value that is equal for equations with the same operation on the same shapes."""
    avals = tuple(x.aval for x in (*eqn.invars, *eqn.outvars))
    return Hashed((Signature(known).write_equation(eqn), avals))


def _find_periods(kinds: np.ndarray) -> list[int]:
    """Returns the most frequent distances between an equation and the next one of its kind."""
    last: dict[int, int] = {}
    distances: collections.Counter[int] = collections.Counter()
    for i, kind in enumerate(kinds.tolist()):
        if kind in last:
            distances[i - last[kind]] += 1
        last[kind] = i
    # An operation that occurs several times in a layer hides the distance of the layers. But each
    # layer also has operations that occur once, and these have that distance.
    return [x for x, number in distances.most_common(_MAX_PERIODS) if number >= _MIN_LAYERS - 1]


def _find_repetitions(kinds: np.ndarray, period: int) -> list[tuple[int, int]]:
    """Returns where runs of at least `_MIN_LAYERS` periods begin, with their number of periods."""
    same = np.concatenate([[False], kinds[period:] == kinds[:-period], [False]])
    changes = np.flatnonzero(same[1:] != same[:-1])
    runs = zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True)
    counted = [(start, (end - start) // period + 1) for start, end in runs]
    return [(start, count) for start, count in counted if count >= _MIN_LAYERS]


def _multiplies_results(first: Sequence[core.JaxprEqn], second: Sequence[core.JaxprEqn]) -> bool:
    """Whether a product in the second block depends on a result of the first."""
    # A sum of the results of experts or heads depends on the previous one, too, but its products
    # do not: a loop would compute one after the other.
    depends = {x for eqn in first for x in eqn.outvars}
    for eqn in second:
        if not depends.isdisjoint(x for x in eqn.invars if isinstance(x, core.Var)):
            depends.update(eqn.outvars)
            if _is_product(eqn):
                return True
    return False


def _is_product(eqn: core.JaxprEqn) -> bool:
    inside = map(jaxprs.walk, jaxprs.programs_of(eqn.params.values()))
    return any(x.primitive.name in _PRODUCTS for x in itertools.chain([eqn], *inside))


def _are_layers(jaxpr: core.Jaxpr, start: int, blocks: Sequence[Sequence[core.JaxprEqn]]) -> bool:
    """Whether one loop could compute blocks of the same operations, with weights of their own."""
    made_before = {x for eqn in jaxpr.eqns[:start] for x in eqn.outvars}
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    wirings, outside = [], []
    made: dict[core.Var, int] = {}
    for block in blocks:
        previous, made, free = made, {}, {}
        wiring: list[tuple[str, int]] = []
        for eqn in block:
            for x in eqn.invars:
                if isinstance(x, core.Literal):
                    continue
                if x in made:
                    wiring.append(("own", made[x]))
                elif x in previous:
                    wiring.append(("previous", previous[x]))
                elif x in inputs or x in made_before:
                    wiring.append(("outside", free.setdefault(x, len(free))))
                else:
                    return False  # of an earlier layer, as in a U-Net
            for x in eqn.outvars:
                made[x] = len(made)
        wirings.append(wiring)
        outside.append(list(free))
    # The first layer reads from outside what the others read from the previous layer.
    pairs = zip(wirings[0], wirings[1], strict=True)
    if any("own" in (x[0], y[0]) and x != y for x, y in pairs):
        return False
    if any(x != wirings[1] for x in wirings[2:]):
        return False
    columns = list(zip(*outside[1:], strict=True))
    if any(1 < len(set(x)) < len(x) for x in columns):
        return False  # only some layers share it
    return any(
        len(set(column)) > 1 and all(x in inputs and len(jaxprs.shape_of(x)) > 1 for x in column)
        for column in columns
    )
