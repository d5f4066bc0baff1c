"""Finds the line at which a step on the replicas begins to differ from one device.

Both are one program, at two numbers of rows. So each value of the replicas has a counterpart on one
device, and one of three relations to it, up to a factor: it is *equal* on every replica, the
replicas' *rows* together equal the rows of one device, or the replicas' parts *sum* to its value.
A mean over a replica's own rows is such a part with a factor of n. A value without a relation comes
from an operation that mixes parts nonlinearly, such as clipping each part. A reduction whose result
has a factor is the wrong reduction.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.programs import flat_program, operations, random_streams
from tpudist.programs.flat_program import FlatProgram, Operation, is_collective
from tpudist.programs.user_lines import first_line_of
from tpudist.xla.mesh import REPLICA_AXIS

Compute = Callable[[Operation, Sequence[Any]], list[Any]]

_TOLERANCE = 1e-2
"""Relative to the value, of a relation."""

_LARGEST = 1e15
"""Magnitude from which a number stands for infinity."""

_SCALES = (
    "div",
    "mul",
    "convert_element_type",
    "neg",
    "reshape",
    "squeeze",
    "copy",
    "broadcast_in_dim",
)


_REDUCTIONS = ("psum", "psum_invariant", "reduce_scatter", "psum_scatter", "pmax", "pmin")
_ADDITIONS = ("add", "add_any", "sub")
_ADDENDS = ("equal", "rows", "sum")
_MOVES = frozenset(
    "axis_index reshape transpose slice dynamic_slice broadcast_in_dim squeeze expand_dims "
    "concatenate gather all_gather ppermute all_to_all rev".split()
)
"""Operations that only move rows: where rows are grouped otherwise, no value is wrong yet."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of one replica with its inputs.

    Attributes:
        closed: The jaxpr, traced without a mesh.
        stacked: The inputs that have one part per replica, as a list of booleans.
        inputs: The inputs; `[num_replicas, ...]` if stacked.
    """

    closed: Any
    stacked: Sequence[bool]
    inputs: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class _Relation:
    """The relation of a value of the replicas to its counterpart on one device.

    Attributes:
        kind: "equal", "rows" or "sum"; "zero" if both are zero; "" if there is none; "shape" if
            there can be none.
        factor: The value of the replicas, or the sum, divided by the value of one device.
    """

    kind: str
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in the user's code.

    Attributes:
        line: The line, `file:line`; empty if unknown.
        factor: The factor of the values of that line, if it is a wrong reduction.
        kind: "reduction"; "nonlinear", an operation before a reduction; "mixed", an addition of
            values of which a sum over the replicas makes only some those of one device; "number", a
            number in the program that is another one on one device; or "" for others.
    """

    line: str = ""
    factor: float | None = None
    kind: str = ""


class Places:
    """The lines at which outputs of a step begin to differ from one device."""

    def __init__(self, many: Program, one: Program, n: int, *, fixes_draws: bool):
        """Evaluates both programs.

        Args:
            many: The program of a replica of n.
            one: The program of one device.
            n: Number of replicas.
            fixes_draws: Whether to replace random bits by a constant.
        """
        self._compute = (
            random_streams.compute_fixed if fixes_draws else operations.compute_operation
        )
        self._program = flat_program.flatten(many.closed, inline_calls=True)
        theirs = flat_program.flatten(one.closed, inline_calls=True)
        pairs = _align(self._program, theirs)
        self._relations = _find_relations(many, one, self._program, theirs, pairs, n, self._compute)
        self._n = n

    def find(self, output: int, *, has_factor: bool) -> "Place":
        """Returns the place at which an output begins to differ.

        Args:
            output: The number of the output.
            has_factor: Whether the output differs by a power of the number of replicas. The line of
                a wrong reduction then comes before the line of a nonlinear operation.
        """
        wanted = _slice(self._program, [self._program.outputs[output]])
        steps = [x for x in self._program.steps if wanted.intersection(x.outputs)]
        reduction = _wrong_reduction(steps, self._relations)
        nonlinear = _nonlinear(steps, self._relations)
        if reduction and (has_factor or not nonlinear or reduction[0] <= nonlinear[0]):
            return Place(reduction[1], reduction[2], "reduction")
        if nonlinear and _is_mixed(steps[nonlinear[0]], self._relations, self._n):
            # Gradients are added where the loss function says nothing; the loss itself is earlier.
            every = (x for x in self._program.steps if _is_mixed(x, self._relations, self._n))
            return Place(next(filter(None, map(line_of, every)), nonlinear[1]), kind="mixed")
        if nonlinear:
            return Place(nonlinear[1], kind="nonlinear")
        relations = self._relations
        if line := _not_reduced(steps, relations) or _find_move(steps, relations):
            return Place(line)
        return Place(_wrong_number(steps, relations), kind="number")


def _align(ours: FlatProgram, theirs: FlatProgram) -> dict[int, int]:
    """Returns the counterpart on one device of each value of a replica, by number."""
    pairs = dict(zip(ours.inputs, theirs.inputs, strict=True))
    # A split into as many parts as replicas has another number of results on one device.
    a, b = ([(x.eqn.primitive.name, len(x.outputs)) for x in y.steps] for y in (ours, theirs))
    if a == b:
        blocks: Any = [(0, 0, len(a))]
    else:
        blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    for i, j, size in blocks:
        for x, y in zip(ours.steps[i : i + size], theirs.steps[j : j + size], strict=True):
            pairs.update(zip(x.outputs, y.outputs, strict=True))
    for step in ours.steps:  # JAX leaves out collectives of one replica, and their conversions
        converts = step.eqn.primitive.name == "convert_element_type"
        if (converts or is_collective(step.eqn)) and len(step.inputs) == len(step.outputs):
            for source, result in zip(step.inputs, step.outputs, strict=True):
                if source in pairs:
                    pairs.setdefault(result, pairs[source])
    return pairs


def _slice(program: FlatProgram, numbers: Sequence[int]) -> set[int]:
    """The values that some values are computed from."""
    wanted = set(numbers)
    for step in reversed(program.steps):
        if wanted.intersection(step.outputs):
            wanted.update(step.inputs)
    return wanted


def _find_relations(
    many: Program,
    one: Program,
    ours: FlatProgram,
    theirs: FlatProgram,
    pairs: dict[int, int],
    n: int,
    compute: Compute,
) -> dict[int, _Relation]:
    numbers = sorted(pairs)

    def all_statistics(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        values = _evaluate(ours, a, many.stacked, n, compute)
        others = _evaluate(theirs, b, one.stacked, 1, compute)
        return [
            _statistics(values[x], others[pairs[x]][0], n)
            if x in values and pairs[x] in others
            else {}
            for x in numbers
        ]

    # The program runs once, so compiling it takes longer than running it.
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    options = fast if jax.default_backend() == "cpu" else None
    found = jax.jit(all_statistics, compiler_options=options)(list(many.inputs), list(one.inputs))
    return {
        number: relation
        for number, statistics in zip(numbers, found, strict=True)
        if (relation := _read(statistics, n)) is not None
    }


def _evaluate(
    program: FlatProgram,
    inputs: Sequence[Any],
    stacked: Sequence[bool],
    n: int,
    compute: Compute,
) -> dict[int, Any]:
    """The values of all replicas `[n, ...]`, by number."""
    axes = [0 if x else None for x in stacked]

    def one_replica(*values: Any) -> dict[int, Any]:
        found = operations.evaluate(program, values, compute)
        return {i: x for i, x in enumerate(found) if hasattr(x, "dtype")}

    return jax.vmap(one_replica, in_axes=axes, out_axes=0, axis_name=REPLICA_AXIS, axis_size=n)(
        *inputs
    )


def _statistics(many: Any, one: Any, n: int) -> dict[str, Any]:
    """The products of the arrays of each relation that the shapes allow, one matrix each.

    One matrix product for each value takes far less time to compile than sums of squares do.
    """
    if not jnp.issubdtype(one.dtype, jnp.number) or not one.size:
        return {}
    if one.dtype == jnp.uint32:
        return {}  # random keys and bits: draws are compared by what is made of them
    if many.shape[1:] == one.shape:
        parts = _reals(many.reshape(n, -1))
        kind = "numbers" if one.size == 1 and one.dtype.itemsize > 2 else "parts"
        return {kind: _products(parts, parts.sum(0, keepdims=True), _reals(one.reshape(1, -1)))}
    if many.ndim != 1 + one.ndim:
        return {}  # no counterparts: the programs are aligned by the names of operations only
    dims = [i for i, (a, b) in enumerate(zip(many.shape[1:], one.shape, strict=True)) if a != b]
    if len(dims) == 1 and many.shape[1 + dims[0]] * n == one.shape[dims[0]]:
        joined = jnp.moveaxis(many, 0, dims[0]).reshape(1, -1)
        return {"rows": _products(_reals(joined), _reals(one.reshape(1, -1)))}
    return {"shape": jnp.zeros((2, 2))}


def _reals(x: Any) -> Any:
    """A matrix in float32, in which imaginary parts follow the real ones.

    Numbers that are not finite, or stand for infinity in a mask, count as one.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.concatenate([x.real, x.imag], 1)
    x = x.astype(jnp.float32)
    return jnp.where(jnp.abs(x) < _LARGEST, x, 1.0)


def _products(*matrices: Any) -> Any:
    rows = jnp.concatenate(matrices)
    return jnp.dot(rows, rows.T, precision=jax.lax.Precision.HIGHEST)


def _fit(aa: float, ab: float, bb: float) -> tuple[float, float]:
    """The factor by which `b` comes closest to `a`, and the relative error that is left."""
    if not aa and not bb:
        return math.nan, 0.0
    factor = ab / bb if bb else 0.0
    error = aa - 2 * factor * ab + factor**2 * bb
    return factor, math.sqrt(max(error, 0.0) / aa) if aa else 0.0


def _read(statistics: dict[str, Any], n: int) -> _Relation | None:
    if not statistics:
        return None
    if "shape" in statistics:
        return _Relation("shape")
    # Between two numbers there is a factor by chance: it must be exact.
    tolerance = _TOLERANCE if "numbers" not in statistics else _TOLERANCE / 100
    fits = {}
    for kind, matrix in statistics.items():
        m = np.asarray(matrix, np.float64)
        if kind in ("parts", "numbers"):
            own, total, one = np.trace(m[:n, :n]), m[n, n], m[-1, -1]
            fits["equal"] = _fit(own, m[n, -1], n * one)
            fits["sum"] = _fit(total, m[n, -1], one)
        elif kind == "rows":
            fits["rows"] = _fit(m[0, 0], m[0, 1], m[1, 1])
    if any(math.isnan(f) for f, _ in fits.values()):
        return _Relation("zero")
    for kind in ("equal", "rows", "sum"):
        if kind in fits and fits[kind][1] < tolerance:
            factor = fits[kind][0]
            power = math.log(abs(factor), n) if factor else math.inf
            # Any factor but a power of n is chance, as between two scalars.
            if factor > 0 and abs(power - round(power)) < tolerance:
                return _Relation(kind, float(n) ** round(power))
    return _Relation("")


def _wrong_reduction(
    steps: Sequence[Operation], relations: dict[int, _Relation]
) -> tuple[int, str, float] | None:
    """The first reduction whose result is equal on all replicas and has a factor.

    Returns its number, its line and the factor.
    """
    users: dict[int, list[Operation]] = {}
    for step in steps:
        for number in step.inputs:
            users.setdefault(number, []).append(step)
    for i, step in enumerate(steps):
        if step.eqn.primitive.name in _REDUCTIONS and is_collective(step.eqn):
            line = line_of(step)
            ends = [relations.get(_end_of_scaling(x, line, users)) for x in step.outputs]
            wrong = [x.factor for x in ends if x and x.kind == "equal" and x.factor != 1]
            if line and wrong:
                return i, line, wrong[0]
    return None


def _nonlinear(
    steps: Sequence[Operation], relations: dict[int, _Relation]
) -> tuple[int, str] | None:
    """The first operation that makes a value without a relation from values with one."""
    for i, step in enumerate(steps):
        name = step.eqn.primitive.name
        made = [relations.get(x) for x in step.outputs]
        given = [relations.get(x) for x in step.inputs]
        broken = [x for x in made if x is not None and x.kind in ("", "shape")]
        if not broken or (name in _MOVES and not any(x.kind for x in broken)):
            continue
        if all(x is None or x.kind not in ("", "shape") for x in given) and (line := line_of(step)):
            return i, line
    return None


def _is_mixed(step: Operation, relations: dict[int, _Relation], n: int) -> bool:
    """Whether an operation adds values that a sum over the replicas makes unequally large.

    A value that is equal on all replicas becomes n times as large by that sum.
    """
    given = [relations[x] for x in step.inputs if x in relations]
    factors = {x.factor * (n if x.kind == "equal" else 1) for x in given if x.kind in _ADDENDS}
    made = (relations.get(x) for x in step.outputs)
    is_broken = any(x is not None and not x.kind for x in made)
    return step.eqn.primitive.name in _ADDITIONS and is_broken and len(factors) > 1


def _find_move(steps: Sequence[Operation], relations: dict[int, _Relation]) -> str:
    """The line of the first operation that groups or chooses rows otherwise."""
    for step in steps:
        made = [relations.get(x) for x in step.outputs]
        given = [relations.get(x) for x in step.inputs]
        if any(x is not None and not x.kind for x in made) and all(
            x is None or x.kind for x in given
        ):
            if line := line_of(step):
                return line
    return ""


def _wrong_number(steps: Sequence[Operation], relations: dict[int, _Relation]) -> str:
    """The line of the last operation whose result has a factor, though no input has one.

    The program then contains another number, such as the number of the replica's own rows. Earlier
    operations of this kind were made up for.
    """
    for step in reversed(steps):
        made = [relations.get(i) for i in step.outputs]
        given = [relations.get(i) for i in step.inputs]
        if any(x and x.kind == "equal" and x.factor != 1 for x in made):
            if all(x is None or x.kind == "zero" or x.factor == 1 for x in given):
                if line := line_of(step):
                    return line
    return ""


def _end_of_scaling(number: int, line: str, users: dict[int, list[Operation]]) -> int:
    """The value that a value becomes by the operations of the same line that only scale it."""
    while True:
        following = [
            x
            for x in users.get(number, ())
            if x.eqn.primitive.name in _SCALES and line_of(x) == line and len(x.outputs) == 1
        ]
        if len(following) != 1 or len(users[number]) != 1:
            return number
        number = following[0].outputs[0]


def _not_reduced(steps: Sequence[Operation], relations: dict[int, _Relation]) -> str:
    """The line of the first operation that joins a part of one replica to a value of all.

    If no such value is there but zeros, such as moments before the first step, the line of the last
    operation that adds a part to zeros.
    """
    added = ""
    for step in steps:
        made = [relations.get(i) for i in step.outputs]
        kinds = {relations[i].kind for i in step.inputs if i in relations}
        if "sum" not in kinds:
            continue
        if "equal" in kinds and any(x and x.kind != "sum" for x in made):
            if line := line_of(step):
                return line
        if "zero" in kinds and step.eqn.primitive.name in ("add", "sub", "add_any"):
            added = line_of(step) or added
    return added


def line_of(step: Operation) -> str:
    """The user's line of an operation, or of the call that contains it."""
    return first_line_of((step.eqn, *reversed(step.calls)))
