"""Where the values of a trace come from: which inputs, constants and instructions of the user's.

An instruction that calls JAX alike for few rows may still be handed another value
(`x if n == 1 else y`). JAX writes one operation in several ways; what an operation that it writes
alike reads is compared, operand by operand, through all that changes nothing.
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

from tpudist.programs.rows.labels import Corner, Varies
from tpudist.programs.rows.row_sizes import Piecewise, RowNumber, RowSize
from tpudist.programs.rows.trace_steps import (
    NOWHERE,
    Predicted,
    Site,
    Step,
    Traced,
    changes_nothing,
    is_call,
    is_literal,
    shapes_compared,
    site_of,
)

Origins = frozenset[Any] | None
"""The inputs, constants and sites that a value comes from; None if that is not known."""

_NOTHING: frozenset[Any] = frozenset()


class ValueOrigins:
    """What the operations of one trace read.

    Attributes:
        reads: For each site and operation, by its primitive and its shapes: what its operands come
            from, each time that it occurs.
        results: What the results come from.
    """

    def __init__(
        self, program: Predicted | Traced, live: Collection[int], passing: Collection[Site]
    ):
        """Follows a trace.

        Args:
            program: The trace.
            live: The ids of its equations that compute something that is used.
            passing: The sites that change nothing in one of the traces that are compared.
        """
        self._live, self._passing = live, passing
        self.reads: dict[tuple[Site, Any], set[tuple[Origins, ...]]] = collections.defaultdict(set)
        inputs = [frozenset({("input", i)}) for i in range(len(program.jaxpr.invars))]
        self.results = self._follow(program, inputs, NOWHERE)

    def _follow(
        self, program: Predicted | Traced, inputs: Sequence[Origins], around: Site
    ) -> list[Origins]:
        known: dict[Any, Origins] = dict(zip(program.jaxpr.invars, inputs, strict=True))
        # Without a constant for each, they are not known.
        for variable, value in itertools.zip_longest(program.jaxpr.constvars, program.consts):
            known[variable] = _origin_of_constant(value)

        def find(atom: Any, shape: Sequence[int]) -> Origins:
            return _NOTHING if is_literal(atom) or 0 in shape else known[atom]

        for step in program.steps():
            eqn, count = step.eqn, len(step.eqn.invars)
            operands = tuple(map(find, eqn.invars, step.shapes[:count]))
            site = site_of(eqn)[0] or around
            results = self._follow_step(step, operands, site)
            known |= zip(eqn.outvars, results, strict=True)
        return [find(v, getattr(v.aval, "shape", ())) for v in program.jaxpr.outvars]

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
    """What reads another value than expected, in words, and its site; None if nothing does."""
    for (site, key), read in actual.reads.items():
        own = expected.reads.get((site, key))
        if own and not all(any(_agree_all(ours, theirs) for ours in own) for theirs in read):
            return f"the input of {key[0]}", site
    if not _agree_all(expected.results, actual.results):
        return "the result", NOWHERE
    return None


def _agree_all(own: Sequence[Origins], theirs: Sequence[Origins]) -> bool:
    return all(map(_agree, own, theirs))


def _agree(own: Origins, theirs: Origins) -> bool:
    return own is None or theirs is None or theirs <= own  # of several JAX may need fewer


def _join(origins: Sequence[Origins]) -> Origins:
    known = [each for each in origins if each is not None]
    return frozenset().union(*known) if len(known) == len(origins) else None


def _inputs_of(body: Predicted | Traced, operands: Sequence[Origins]) -> Sequence[Origins]:
    inputs = body.jaxpr.invars
    return operands if len(inputs) == len(operands) else [_join(operands)] * len(inputs)


def _origin_of_constant(value: Any) -> Origins:
    if value is None or isinstance(
        value, Varies | Corner | Piecewise | RowSize | RowNumber | Tracer
    ):
        return None
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return frozenset({("constant", array.shape, array.dtype.name, zlib.crc32(array.tobytes()))})
