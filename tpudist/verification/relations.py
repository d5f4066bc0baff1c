"""Finds the relation of each value of a step on the replicas to its counterpart on one device."""

# Both runs are the same program with two numbers of rows, so `_align` pairs their operations by
# name. Three relations are possible, up to a factor: the value is *equal* on every replica, the
# replicas' *rows* together equal the rows of one device, or the replicas' parts *sum* to the value
# of one device. A mean over a replica's own rows is such a part, with a factor of n.

import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.programs import flat_program, operations
from tpudist.programs.flat_program import FlatProgram, Operation, is_collective
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.xla.array_attributes import has_dtype
from tpudist.xla.mesh import REPLICA_AXIS

Compute = Callable[[Operation, Sequence[Any]], list[Any]]

# Largest relative error of a relation, above the rounding of bfloat16 (4e-3). Two numbers always
# have some factor, so for them it must be closer to a power of n.
_TOLERANCE = 1e-2
_TOLERANCE_OF_NUMBERS = 1e-4

_LARGEST = 1e15  # magnitude from which a number stands for infinity, as in masks


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of one replica with its inputs.

    Attributes:
        closed: The jaxpr, traced without a mesh.
        stacked: Whether each input has one part per replica.
        inputs: The inputs; `[num_replicas, ...]` if stacked.
    """

    closed: ClosedJaxpr
    stacked: Sequence[bool]
    inputs: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Relation:
    """The relation of a value of the replicas to its counterpart on one device.

    Attributes:
        kind: "equal", "rows" or "sum"; "zero" if both are zero; "" if there is none; "shape" if
            the shapes allow none.
        factor: The value of the replicas, or the sum, divided by the value of one device.
    """

    kind: str
    factor: float = 1.0

    @property
    def is_broken(self) -> bool:
        """Whether the values have counterparts, but no relation."""
        return self.kind in ("", "shape")


def find_relations(
    many: Program, one: Program, flat: FlatProgram, n: int, compute: Compute
) -> dict[int, Relation]:
    """Returns the relations of the values of a step, by their number in `flat`.

    Values that have no counterpart, and values that are not numbers, have no entry.

    Args:
        many: The program of a replica of n.
        one: The program of one device.
        flat: The flat program of `many`.
        n: Number of replicas.
        compute: Called with each operation and its inputs; returns its results.
    """
    flat_one = flat_program.flatten(one.closed, inline_calls=True)
    pairs = _align(flat, flat_one)
    numbers = sorted(pairs)

    # The statistics are computed in the same program as the values, which need not be in memory all
    # at once and never leave the device.
    def all_statistics(inputs: Sequence[Any], inputs_of_one: Sequence[Any]) -> list[Any]:
        values = _evaluate(flat, inputs, many.stacked, n, compute)
        counterparts = _evaluate(flat_one, inputs_of_one, one.stacked, 1, compute)
        return [
            _statistics(values[x], counterparts[pairs[x]][0], n)
            if x in values and pairs[x] in counterparts
            else {}
            for x in numbers
        ]

    # The program runs once, so compiling it takes longer than running it.
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    options = fast if jax.default_backend() == "cpu" else None
    compiled = jax.jit(all_statistics, compiler_options=options)
    all_found = compiled(list(many.inputs), list(one.inputs))
    return {
        number: relation
        for number, statistics in zip(numbers, all_found, strict=True)
        if (relation := _read(statistics, n)) is not None
    }


def _align(many: FlatProgram, one: FlatProgram) -> dict[int, int]:
    """Returns the counterpart on one device of each value of a replica, by number."""
    pairs = dict(zip(many.inputs, one.inputs, strict=True))
    # A split into as many parts as replicas has another number of results on one device.
    a, b = ([(x.eqn.primitive.name, len(x.outputs)) for x in y.steps] for y in (many, one))
    if a == b:
        blocks: Any = [(0, 0, len(a))]
    else:  # quadratic, but needed only to explain a difference
        blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    for i, j, size in blocks:
        for x, y in zip(many.steps[i : i + size], one.steps[j : j + size], strict=True):
            pairs.update(zip(x.outputs, y.outputs, strict=True))
    # JAX omits collectives of one replica, and their conversions: the result has the counterpart
    # of the operand.
    for step in many.steps:
        converts = step.eqn.primitive.name == "convert_element_type"
        if (converts or is_collective(step.eqn)) and len(step.inputs) == len(step.outputs):
            for source, result in zip(step.inputs, step.outputs, strict=True):
                if source in pairs:
                    pairs.setdefault(result, pairs[source])
    return pairs


def _evaluate(
    program: FlatProgram,
    inputs: Sequence[Any],
    stacked: Sequence[bool],
    n: int,
    compute: Compute,
) -> dict[int, jax.Array]:
    """Returns the values of all replicas `[n, ...]`, by number."""
    axes = [0 if x else None for x in stacked]

    def one_replica(*values: jax.Array) -> dict[int, Any]:
        results = operations.evaluate(program, values, compute)
        # Only arrays can be results of `vmap`: constants may be other objects of JAX.
        return {i: x for i, x in enumerate(results) if has_dtype(x)}

    return jax.vmap(one_replica, in_axes=axes, out_axes=0, axis_name=REPLICA_AXIS, axis_size=n)(
        *inputs
    )


def _statistics(many: jax.Array, one: jax.Array, n: int) -> dict[str, Any]:
    """Returns the products of the arrays that are compared, under the name of the comparison.

    One of "parts", "numbers" (parts of one element), "rows" and "shape". Nothing if the values are
    not counterparts.
    """
    # One matrix product for each value takes far less time to compile than sums of squares do. The
    # products of all pairs of rows are enough for a least-squares fit (`_fit`).
    if not jnp.issubdtype(one.dtype, jnp.number) or not one.size:
        return {}
    if one.dtype == jnp.uint32:
        return {}  # random keys and bits: the numbers drawn with them are compared
    if many.shape[1:] == one.shape:
        parts = _reals(many.reshape(n, -1))
        # bfloat16 could never meet the closer tolerance of numbers.
        kind = "numbers" if one.size == 1 and one.dtype.itemsize > 2 else "parts"
        return {kind: _products(parts, parts.sum(0, keepdims=True), _reals(one.reshape(1, -1)))}
    if many.ndim != 1 + one.ndim:
        return {}  # not a counterpart: programs are aligned by the names of operations only
    dims = [i for i, (a, b) in enumerate(zip(many.shape[1:], one.shape, strict=True)) if a != b]
    if len(dims) == 1 and many.shape[1 + dims[0]] * n == one.shape[dims[0]]:
        joined = jnp.moveaxis(many, 0, dims[0]).reshape(1, -1)
        return {"rows": _products(_reals(joined), _reals(one.reshape(1, -1)))}
    return {"shape": jnp.zeros((2, 2))}


def _reals(x: jax.Array) -> jax.Array:
    """Returns a float32 matrix, in which the imaginary parts follow the real ones.

    Numbers that are not finite, or stand for infinity in a mask, count as one: on both sides, so
    that the other numbers decide.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.concatenate([x.real, x.imag], 1)
    x = x.astype(jnp.float32)
    return jnp.where(jnp.abs(x) < _LARGEST, x, 1.0)


def _products(*matrices: jax.Array) -> jax.Array:
    rows = jnp.concatenate(matrices)
    return jnp.dot(rows, rows.T, precision=jax.lax.Precision.HIGHEST)


def _fit(aa: float, ab: float, bb: float) -> tuple[float, float]:
    """Returns the factor by which `b` comes closest to `a`, and the relative error that is left.

    Args:
        aa: The product of `a` with itself.
        ab: The product of `a` and `b`.
        bb: The product of `b` with itself.
    """
    if not aa and not bb:
        return 1.0, 0.0
    factor = ab / bb if bb else 0.0
    error = aa - 2 * factor * ab + factor**2 * bb
    return factor, math.sqrt(max(error, 0.0) / aa) if aa else 0.0


def _read(statistics: dict[str, Any], n: int) -> Relation | None:
    if not statistics:
        return None
    if "shape" in statistics:
        return Relation("shape")
    ((kind, matrix),) = statistics.items()
    tolerance = _TOLERANCE_OF_NUMBERS if kind == "numbers" else _TOLERANCE
    m = np.asarray(matrix, np.float64)
    if kind == "rows":
        own, one = m[0, 0], m[1, 1]
        fits = {"rows": _fit(own, m[0, 1], one)}
    else:
        # Rows 0 to n - 1 of the matrix are the replicas' parts, row n is their sum, and the last
        # row is the value of one device. Equality is fitted to all parts at once: n copies of that
        # value.
        own, total, one = np.trace(m[:n, :n]), m[n, n], m[-1, -1]
        fits = {
            "equal": _fit(own, m[n, -1], n * one),
            "sum": _fit(total, m[n, -1], one),
        }
    if not own and not one:
        return Relation("zero")
    # The order matters: equal parts also have a sum with a factor, n times the value.
    for kind in ("equal", "rows", "sum"):
        factor, error = fits.get(kind, (0.0, math.inf))
        if error < tolerance and factor > 0:
            power = math.log(factor, n)
            # A factor that is not a power of n is chance, as between two scalars.
            if abs(power - round(power)) < tolerance:
                return Relation(kind, float(n) ** round(power))
    return Relation("")
