"""Evaluates a labelled program on padded arrays, so that only their real rows count."""

# The invariant of every rule: the leading corner `x[:size_0, :size_1, ...]` of each padded array,
# with the sizes for the real numbers of rows, equals the array that the function would compute
# without padding. All other elements are arbitrary (the tests fill them with NaN). Operations on
# each element keep the invariant by themselves. An operation that mixes elements of a dim of rows
# needs a rule, which masks the padding. An operation that meets rows and has no rule raises an
# error: no result is ever a guess.

import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.typing import ArrayLike

from tpudist.array_types import Shape
from tpudist.programs import jaxprs, operations
from tpudist.programs.rows import contractions
from tpudist.programs.rows.errors import RowsError
from tpudist.programs.rows.labels import (
    Corner,
    Dims,
    LabelledEquation,
    LabelledProgram,
    UnfittedValue,
    depends_on_rows,
    is_unfitted,
)
from tpudist.programs.rows.row_sizes import (
    Count,
    Dim,
    Piecewise,
    RowNumber,
    RowSize,
    is_rows,
    size_at,
)

_OUTSIDE_OF_MICROBATCH = (
    "the rows of a microbatch are used outside of its loss, but other microbatches have different "
    "numbers of rows: join them with tpudist.rows_of_microbatches, or return sums"
)
_MAX_CHARS = 120  # of the values in an error
Rule = Callable[["Operation"], Sequence[Any]]


class MinimumSize(NamedTuple):
    """The least value of a size for which an equation, given by its line and id, is right."""

    size: RowSize
    minimum: int
    line: str
    equation: int


@dataclasses.dataclass
class Requirements:
    """Conditions on the numbers of rows that an evaluation found, to check on the host.

    Attributes:
        minimum_sizes: Sizes with a least value, in the order of the equations.
        equal_sizes: Sizes that must be equal on all replicas, each with the operation that needs
            it.
        gathered: For each gather of the rows of all replicas (by its number) whose result has no
            symbol yet: the size of one replica's rows.
        broken_claims: Numbers of the claims of equality about values that have rows.
    """

    minimum_sizes: dict[MinimumSize, None] = dataclasses.field(default_factory=dict)
    equal_sizes: dict[RowSize, str] = dataclasses.field(default_factory=dict)
    gathered: dict[int, RowSize] = dataclasses.field(default_factory=dict)
    broken_claims: set[int] = dataclasses.field(default_factory=set)


class Evaluator:
    """Evaluates one program for real numbers of rows.

    Args:
        counts: Real number of rows of each symbol, traced int32 scalars; None if it is unknown, as
            outside of the loop over the parts of a batch.
        rules: Called with the name of a primitive; returns its rule or None.
        requirements: Receives the conditions on the numbers of rows.
    """

    def __init__(
        self,
        counts: Sequence[Count | None],
        rules: Callable[[str], Rule | None],
        requirements: Requirements,
    ):
        self.counts: list[Any] = list(counts)
        self.requirements = requirements
        self._rules = rules
        # Values with zeros in their padding, by id, with the dims and sizes where they have them.
        # The values are kept, so that no other value gets the same id.
        self._masked: dict[int, tuple[jax.Array, dict[int, Dim]]] = {}

    def program(self, labelled: LabelledProgram, args: Sequence[ArrayLike]) -> list[Any]:
        """Returns the padded outputs of a program for padded inputs."""
        # A program that takes a part of a batch sets the count of the part (`microbatch_rules`).
        # The count is valid in that program only.
        outer = list(self.counts)
        try:
            return self._outputs(labelled, args)
        finally:
            self.counts = outer

    def _outputs(self, labelled: LabelledProgram, args: Sequence[ArrayLike]) -> list[Any]:
        env: dict[core.Var, Any] = {}
        summed = contractions.find_summed(labelled)

        def define(variable: core.Var, value: Any, dims: Dims) -> None:
            env[variable] = self._mask_summed(value, dims, summed.get(variable, ()))

        for variable, value, dims in zip(
            labelled.jaxpr.invars, args, labelled.in_dims, strict=True
        ):
            define(variable, value, dims)
        for variable, value in zip(labelled.jaxpr.constvars, labelled.consts, strict=True):
            env[variable] = self.constant(value, variable, _line_of_use(labelled, variable))
        for equation in labelled.equations:
            values = [
                env[atom]
                if isinstance(atom, core.Var)
                else self.constant(equation.literals[i], atom, equation.line)
                for i, atom in enumerate(equation.eqn.invars)
            ]
            outputs = self._evaluate(equation, values)
            for variable, value, dims in zip(
                equation.eqn.outvars, outputs, equation.out_dims, strict=True
            ):
                define(variable, value, dims)
        return [
            env[atom]
            if isinstance(atom, core.Var)
            else self.constant(labelled.out_literals[i], atom)
            for i, atom in enumerate(labelled.jaxpr.outvars)
        ]

    def _mask_summed(self, value: Any, dims: Dims, summed: Sequence[int]) -> Any:
        """Returns a value with zeros in the padding of the dims that contractions sum over."""
        _, known = self._masked.get(id(value), (value, {}))
        new = {d: dims[d] for d in summed if known.get(d) != dims[d] and self.is_known(dims[d])}
        for d, size in new.items():
            value = self.mask(value, d, size, 0)
        if new:
            self._masked[id(value)] = value, known | new
        return value

    def is_masked(self, value: jax.Array, dim: int, size: Dim) -> bool:
        """Returns whether a value is known to have zeros beyond the real size of a dim."""
        return id(value) in self._masked and self._masked[id(value)][1].get(dim) == size

    def is_real(self, shape: Shape, dim: int, size: Dim) -> jax.Array:
        """Returns whether each element of a padded array is within the real size of a dim."""
        return lax.broadcasted_iota(jnp.int32, shape, dim) < self.size(size)

    def mask(self, x: jax.Array, dim: int, size: Dim, fill: ArrayLike) -> jax.Array:
        """Returns `x` with `fill` beyond the real size of a dim."""
        return jnp.where(self.is_real(x.shape, dim, size), x, jnp.asarray(fill, x.dtype))

    def is_known(self, dim: Dim) -> bool:
        """Returns whether the real size of a dim is known at this point of the program."""
        return not isinstance(dim, RowSize) or all(self.counts[i] is not None for i in dim.symbols)

    def size(self, dim: Dim) -> Any:
        """Returns the real size of a dim: a traced int32, or an int."""
        if not self.is_known(dim):
            raise RowsError(_OUTSIDE_OF_MICROBATCH)
        return size_at(dim, self._counts_or_zero())

    def _counts_or_zero(self) -> list[Count]:
        # Unknown counts have no effect: `is_known` is checked before.
        return [0 if count is None else count for count in self.counts]

    def constant(self, value: object, atom: jaxprs.Atom, line: str = "") -> Any:
        """Returns the value of a labelled constant or literal for the real numbers of rows.

        Args:
            value: The label.
            atom: The constant or literal in the program, with the padded shape.
            line: The user's line that reads it, for errors.
        """
        dtype = jaxprs.dtype_of(atom)
        if isinstance(value, RowSize):
            if not self.is_known(value):
                raise RowsError(_OUTSIDE_OF_MICROBATCH)
            return jnp.asarray(value.at(self._counts_or_zero()), dtype)
        if isinstance(value, RowNumber):
            return jnp.asarray(value.at(self._counts_or_zero()), dtype)
        if isinstance(value, Piecewise):
            general = self.constant(value.general, atom, line)
            if any(self.counts[i] is None for piece in value.pieces for i, _ in piece.counts):
                raise RowsError(_OUTSIDE_OF_MICROBATCH)
            return jnp.asarray(Piecewise(general, value.pieces).at(self.counts), dtype)
        if isinstance(value, Corner):
            array, shape = jnp.asarray(value.value), jaxprs.shape_of(atom)
            padding = [
                (0, max(size - own, 0)) for size, own in zip(shape, array.shape, strict=True)
            ]
            return jnp.pad(array, padding)[tuple(map(slice, shape))]
        if isinstance(value, UnfittedValue):
            raise RowsError(
                f"a constant depends on the number of rows in an unknown way: {_shorten(value)}. "
                f"{_describe_alternative(value)}",
                line,
            )
        return value

    def _evaluate(self, equation: LabelledEquation, values: list[Any]) -> Sequence[Any]:
        try:
            with equation.eqn.ctx.manager:
                return self._apply_rule(Operation(self, equation, values))
        except RowsError as error:
            if error.line or not equation.line:
                raise
            raise RowsError(error.reason, equation.line) from None

    def _apply_rule(self, operation: "Operation") -> Sequence[Any]:
        # A literal that depends on rows is a plain scalar operand here: it needs no rule.
        # Primitives of tpudist can only be evaluated by their rules.
        has_own_rule = operation.name.startswith("tpudist.")
        if not operation.meets_rows and not operation.contains_rows and not has_own_rule:
            return operation.bind()
        rule = self._rules(operation.name)
        if rule is None:
            return operation.refuse_unknown()
        return rule(operation)


class Operation:
    """One equation, with the padded values of its operands.

    Attributes:
        evaluator: The evaluator of the whole program.
        equation: The labelled equation.
        values: The padded operands.
        params: The labelled parameters.
        in_dims: The dims of each operand.
        out_dims: The dims of each result.
    """

    def __init__(self, evaluator: Evaluator, equation: LabelledEquation, values: list[Any]):
        self.evaluator, self.equation, self.values = evaluator, equation, values
        self.params, self.in_dims = equation.params, equation.in_dims
        self.out_dims = equation.out_dims

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.equation.eqn.primitive.name

    @property
    def out_avals(self) -> list[Any]:
        """Shapes and dtypes of the padded results."""
        return [v.aval for v in self.equation.eqn.outvars]

    @property
    def meets_rows(self) -> bool:
        """Whether an operand, a result or a parameter has a size that depends on rows."""
        dims = itertools.chain(*self.in_dims, *self.out_dims)
        return any(map(is_rows, dims)) or any(map(depends_on_rows, self.params.values()))

    @property
    def contains_rows(self) -> bool:
        """Whether a program inside the equation depends on the number of rows."""
        return any(body.depends_on_rows for body in self.equation.all_bodies)

    def refuse(self, reason: str) -> NoReturn:
        """Raises `RowsError`: this operation cannot be followed."""
        raise RowsError(f"{self.name}: {reason}", self.equation.line)

    def refuse_unknown(self) -> NoReturn:
        """Raises `RowsError`: this operation has no rule."""
        called = self.equation.eqn.params.get("name")
        kernel = f" '{called}'" if isinstance(called, str) and called else ""
        raise RowsError(
            f"{self.name}{kernel}: tpudist has no rule for it on rows. If it computes each row "
            "separately, declare that at its call with tpudist.rowwise",
            self.equation.line,
        )

    def check_params(self, allowed: Collection[str] = ()) -> None:
        """Rejects parameters that depend on the number of rows, except the `allowed` ones.

        These are rejected only if they depend on it by no known formula.
        """
        for name, value in self.params.items():
            if is_unfitted(value) or (name not in allowed and depends_on_rows(value)):
                self.refuse(f"its {name} depends on the number of rows: {_shorten(value)}")

    def size(self, dim: Dim) -> Any:
        """Returns the real size of a dim: a traced int32, or an int."""
        return self.evaluator.size(dim)

    def require_size(self, dim: Dim, minimum: int) -> None:
        """Records the least size for which the operation computes the function."""
        if isinstance(dim, RowSize):
            found = MinimumSize(dim, minimum, self.equation.line, id(self.equation.eqn))
            self.evaluator.requirements.minimum_sizes[found] = None
        elif dim < minimum:
            self.refuse(f"it takes {minimum} of {dim}")

    def require_equal(self, dim: Dim) -> None:
        """Records that a size must be equal on all replicas."""
        if isinstance(dim, RowSize):
            where = f"{self.name} ({self.equation.line})"
            self.evaluator.requirements.equal_sizes.setdefault(dim, where)

    def is_real(self, shape: Sequence[int], dim: int, size: Dim) -> jax.Array:
        """Returns whether each element of a padded array is within the real size of a dim."""
        return self.evaluator.is_real(tuple(shape), dim, size)

    def mask(self, i: int, dims: Sequence[int], fill: ArrayLike) -> Any:
        """Returns operand `i` with `fill` beyond the real rows of these dims."""
        x = self.values[i]
        for dim in dims:
            if self.needs_mask(i, dim, fill):
                x = self.evaluator.mask(x, dim, self.in_dims[i][dim], fill)
        return x

    def needs_mask(self, i: int, dim: int, fill: ArrayLike) -> bool:
        """Returns whether a dim of operand `i` has rows, without `fill` in their padding."""
        size = self.in_dims[i][dim]
        # Zeros only: `fill` may also be an array, which cannot be compared here.
        is_zero = isinstance(fill, int) and fill == 0
        is_masked = is_zero and self.evaluator.is_masked(self.values[i], dim, size)
        return is_rows(size) and not is_masked

    def bind(self, values: Sequence[Any] | None = None, **changed: Any) -> list[Any]:
        """Applies the primitive to `values`, by default to its operands.

        Args:
            values: The operands.
            **changed: Parameters that replace those of the equation.
        """
        values = self.values if values is None else values
        return operations.bind(self.equation.eqn, values, changed)

    def evaluate(self, body: LabelledProgram, args: Sequence[ArrayLike]) -> list[Any]:
        """Evaluates a program inside the equation."""
        return self.evaluator.program(body, args)

    def body(self) -> LabelledProgram:
        """Returns the only program inside the equation."""
        bodies = self.equation.all_bodies
        if len(bodies) != 1:
            self.refuse(f"it contains {len(bodies)} programs")
        return bodies[0]


def _line_of_use(labelled: LabelledProgram, variable: core.Var) -> str:
    """Returns the user's line of the first operation that reads `variable`."""
    readers = (e.line for e in labelled.equations if any(x is variable for x in e.eqn.invars))
    return next(readers, "")


def _describe_alternative(value: UnfittedValue) -> str:
    """Says what to write for a constant that NumPy or Python computes from the number of rows."""
    arrays = [np.asarray(x) for x in value.values]
    if len({x.shape for x in arrays}) == 1:
        return (
            "An array of a list, such as jnp.asarray([n]), hides the position of the number. Make "
            "a scalar, jnp.asarray(x.shape[0]), and combine scalars with jnp.stack"
        )
    if all(x.ndim == 1 and (np.sort(x) == np.arange(len(x))).all() for x in arrays):
        return (
            "NumPy or Python has made an order of the rows. Use jax.random.permutation(key, "
            "x.shape[0]), or jnp.arange(x.shape[0]) and jnp.flip"
        )
    return (
        "NumPy or Python has made an array of it. Compute it with jax.numpy from "
        "jnp.arange(x.shape[0]), or put it into the dataset with one element for each row"
    )


def _shorten(value: Any) -> str:
    values = value.values if isinstance(value, UnfittedValue) else value
    if not isinstance(values, tuple):
        values = (values,)
    arrays = (
        np.asarray(x).tolist() if isinstance(x, jax.Array | np.ndarray | np.generic) else x
        for x in values
    )
    return textwrap.shorten(", ".join(map(str, arrays)), _MAX_CHARS, placeholder=" ...")
