"""Finds the origins of the values in a trace: inputs, constants and the user's instructions.

An instruction that calls JAX in the same way for few rows may still read another value
(`x if n == 1 else y`). JAX writes some operations in several ways, so operations that are written
in the same way are compared: the origins of their operands must agree. Origins pass through
operations that change nothing.
"""

import collections
import itertools
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from tpudist.array_types import Shape
from tpudist.programs import jaxprs
from tpudist.programs.jaxprs import Atom
from tpudist.programs.rows.labels import Corner, UnfittedValue
from tpudist.programs.rows.row_sizes import Piecewise, RowNumber, RowSize
from tpudist.programs.rows.trace_steps import (
    NOWHERE,
    Site,
    Step,
    Trace,
    changes_nothing,
    is_call,
    shapes_compared,
    site_of,
)

Origins = frozenset[Any] | None
"""The inputs, constants and sites that a value is computed from; None if they are unknown."""

_NO_ORIGINS: frozenset[Any] = frozenset()


class ValueOrigins:
    """The origins of all values that the operations of one trace read.

    Args:
        program: The trace.
        live: Ids of its equations whose results are used.
        passing: Sites that change nothing in one of the two compared traces.

    Attributes:
        reads: The origins of the operands of each occurrence of an operation, by site, primitive
            and shapes.
        results: The origins of the results.
    """

    def __init__(self, program: Trace, live: Collection[int], passing: Collection[Site]):
        self._live, self._passing = live, passing
        self.reads: dict[tuple[Site, Any], set[tuple[Origins, ...]]] = collections.defaultdict(set)
        inputs = [frozenset({("input", i)}) for i in range(len(program.jaxpr.invars))]
        self.results = self._follow(program, inputs, NOWHERE)

    def _follow(self, program: Trace, inputs: Sequence[Origins], around: Site) -> list[Origins]:
        origins: dict[core.Var, Origins] = dict(zip(program.jaxpr.invars, inputs, strict=True))
        # An open jaxpr of jax 0.10 has variables without values: None, unknown origins.
        for variable, value in itertools.zip_longest(program.jaxpr.constvars, program.consts):
            origins[variable] = _origin_of_constant(value)

        def origins_of(atom: Atom, shape: Shape) -> Origins:
            # The numbers of literals are compared by `small_counts`.
            return origins[atom] if isinstance(atom, core.Var) and 0 not in shape else _NO_ORIGINS

        for step in program.steps():
            eqn, count = step.eqn, len(step.eqn.invars)
            shapes = step.shapes[:count]
            operands = tuple(origins_of(*x) for x in zip(eqn.invars, shapes, strict=True))
            site = site_of(eqn)[0] or around
            results = self._follow_step(step, operands, site)
            origins |= zip(eqn.outvars, results, strict=True)
        return [origins_of(v, jaxprs.shape_of(v)) for v in program.jaxpr.outvars]

    def _follow_step(
        self, step: Step, operands: tuple[Origins, ...], site: Site
    ) -> Sequence[Origins]:
        eqn = step.eqn
        num_results = len(eqn.outvars)
        inside = [self._follow(body, _inputs_of(body, operands), site) for body in step.bodies]
        if len(inside) == 1 and is_call(eqn) and len(inside[0]) == num_results:
            return inside[0]
        if changes_nothing(step) or site in self._passing:
            return [_join(operands)] * num_results
        if id(eqn) in self._live:
            self.reads[site, (eqn.primitive.name, shapes_compared(step))].add(operands)
        return [frozenset({site})] * num_results


def find_other_value(expected: ValueOrigins, actual: ValueOrigins) -> tuple[str, Site] | None:
    """Describes an operation or result that reads another value than expected, with its site.

    None if all values are the expected ones.
    """
    for (site, key), occurrences in actual.reads.items():
        own = expected.reads.get((site, key))
        # Without own records, JAX has written the operation in another way for few rows.
        if own and not all(any(_agree_all(x, other) for x in own) for other in occurrences):
            return f"the input of {key[0]}", site
    if not _agree_all(expected.results, actual.results):
        return "the result", NOWHERE
    return None


def _agree_all(expected: Sequence[Origins], actual: Sequence[Origins]) -> bool:
    return all(_agree(x, y) for x, y in zip(expected, actual, strict=True))


def _agree(expected: Origins, actual: Origins) -> bool:
    # A subset, since JAX may need fewer of several values for few rows.
    return expected is None or actual is None or actual <= expected


def _join(origins: Sequence[Origins]) -> Origins:
    known = [each for each in origins if each is not None]
    return frozenset().union(*known) if len(known) == len(origins) else None


def _inputs_of(body: Trace, operands: Sequence[Origins]) -> Sequence[Origins]:
    inputs = body.jaxpr.invars
    return operands if len(inputs) == len(operands) else [_join(operands)] * len(inputs)


def _origin_of_constant(value: object) -> Origins:
    if value is None or isinstance(
        value, UnfittedValue | Corner | Piecewise | RowSize | RowNumber | Tracer
    ):
        return None
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    # Two constants with one checksum would hide that the user's code swaps them for few rows.
    return frozenset({("constant", array.shape, array.dtype.name, zlib.crc32(array.tobytes()))})
