"""Evaluates a labelled program on padded arrays, so that only their real rows count.

One invariant makes every rule short: the leading corner `x[:size_0, :size_1, ...]` of each padded
array, with the sizes for the real numbers of rows, is exactly the array that the function would
have had. What lies beyond is anything. Operations that treat each element alike keep it by
themselves; those that mix elements of a dim of rows are masked by their rules. An operation that
meets rows and has no rule is refused.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from tpudist.programs import jaxprs
from tpudist.programs.rows import contractions
from tpudist.programs.rows.errors import RowsError
from tpudist.programs.rows.labels import (
    Corner,
    Dims,
    LabelledEquation,
    LabelledProgram,
    Varies,
    varies,
)
from tpudist.programs.rows.row_sizes import Dim, Piecewise, RowNumber, RowSize, is_rows, size_at

_OUTSIDE_OF_PART = (
    "the rows of a microbatch are used outside of its loss, but other microbatches have different "
    "numbers of rows: join them with tpudist.rows_of_microbatches, or return sums"
)
Rule = Callable[["Operation"], Sequence[Any]]
Need = tuple[RowSize, int, str, int]
"""A size, what it must be at least, the user's line that says so, and the id of the equation."""


class Evaluator:
    """Evaluates one program for real numbers of rows.

    Attributes:
        counts: The real number of rows of each symbol, traced int32 scalars; None where it is not
            known, as outside of the loop over the parts of a batch.
        needs: What sizes must be at least, to be checked on the host before a run.
        even: Sizes that must be the same on all replicas, and where.
        gathered: Gathers of the rows of all replicas that have no symbol of their own, with the
            size of one replica's.
        broken_claims: Claims that a value is equal on all replicas, of values that have rows.
    """

    def __init__(self, counts: Sequence[Any], rules: Callable[[str], Rule | None]):
        """Evaluates with these rules, by the name of the primitive."""
        self.counts = list(counts)
        self.needs: dict[Need, None] = {}
        self.even: dict[RowSize, str] = {}
        self.gathered: dict[int, RowSize] = {}
        self.broken_claims: set[int] = set()
        self._rules = rules
        # By id, and kept so that it stays theirs: values, and the sizes beyond which they are zero.
        self._masked: dict[int, tuple[Any, dict[int, Dim]]] = {}

    def program(self, labelled: LabelledProgram, args: Sequence[Any]) -> list[Any]:
        """The outputs of a program for padded inputs."""
        # Where a program takes a part of a batch, the part's rows are known in that program only.
        outer = list(self.counts)
        try:
            return self._outputs(labelled, args)
        finally:
            self.counts = outer

    def _outputs(self, labelled: LabelledProgram, args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = {}
        summed = contractions.find_summed(labelled)

        def enter(variable: Any, value: Any, dims: Dims) -> None:
            env[variable] = self._mask_summed(value, dims, summed.get(variable, ()))

        for variable, value, dims in zip(
            labelled.jaxpr.invars, args, labelled.in_dims, strict=True
        ):
            enter(variable, value, dims)
        for variable, value in zip(labelled.jaxpr.constvars, labelled.consts, strict=True):
            env[variable] = self.constant(value, variable.aval, _line_of_use(labelled, variable))
        for equation in labelled.equations:
            values = [
                self.constant(equation.literals[i], atom.aval, equation.line)
                if i in equation.literals
                else env[atom]
                for i, atom in enumerate(equation.eqn.invars)
            ]
            outputs = self._evaluate(equation, values)
            for variable, value, dims in zip(
                equation.eqn.outvars, outputs, equation.out_dims, strict=True
            ):
                enter(variable, value, dims)
        return [
            self.constant(labelled.out_literals[i], atom.aval)
            if i in labelled.out_literals
            else env[atom]
            for i, atom in enumerate(labelled.jaxpr.outvars)
        ]

    def _mask_summed(self, value: Any, dims: Dims, over: Sequence[int]) -> Any:
        """A value with zeros beyond the real rows of the dims that contractions sum over."""
        _, already = self._masked.get(id(value), (value, {}))
        known = {d: dims[d] for d in over if already.get(d) != dims[d] and self.is_known(dims[d])}
        for d, size in known.items():
            value = self.mask(value, d, size, 0)
        if known:
            self._masked[id(value)] = value, already | known
        return value

    def is_masked(self, value: Any, dim: int, size: Dim) -> bool:
        """Whether a value is known to have zeros beyond the real size of a dim."""
        return id(value) in self._masked and self._masked[id(value)][1].get(dim) == size

    def mask(self, x: Any, dim: int, size: Dim, fill: Any) -> Any:
        """`x` with `fill` beyond the real size of a dim."""
        real = lax.broadcasted_iota(jnp.int32, x.shape, dim) < self.size(size)
        return jnp.where(real, x, jnp.asarray(fill, x.dtype))

    def is_known(self, dim: Dim) -> bool:
        """Whether it is known here how large a dim is."""
        return not isinstance(dim, RowSize) or all(self.counts[i] is not None for i in dim.symbols)

    def size(self, dim: Dim) -> Any:
        """How large a dim really is: a traced int32, or an int."""
        if not self.is_known(dim):
            raise RowsError(_OUTSIDE_OF_PART)
        return size_at(dim, self._counts_or_zero())

    def _counts_or_zero(self) -> list[Any]:
        return [0 if count is None else count for count in self.counts]

    def constant(self, value: Any, aval: Any, line: str = "") -> Any:
        """A constant or a literal for the real numbers of rows, which the user's `line` reads."""
        if isinstance(value, RowSize):
            self.size(value)  # refuses what is not known here
            return jnp.asarray(value.at(self._counts_or_zero()), aval.dtype)
        if isinstance(value, RowNumber):
            return jnp.asarray(value.at(self._counts_or_zero()), aval.dtype)
        if isinstance(value, Piecewise):
            general = self.constant(value.general, aval, line)
            if any(self.counts[i] is None for piece in value.pieces for i, _ in piece.counts):
                raise RowsError(_OUTSIDE_OF_PART)
            return jnp.asarray(Piecewise(general, value.pieces).at(self.counts), aval.dtype)
        if isinstance(value, Corner):
            array = jnp.asarray(value.value)
            padding = [
                (0, max(size - own, 0)) for size, own in zip(aval.shape, array.shape, strict=True)
            ]
            return jnp.pad(array, padding)[tuple(map(slice, aval.shape))]
        if isinstance(value, Varies):
            raise RowsError(
                f"a constant depends on the number of rows in an unknown way: {_shorten(value)}. "
                f"{_way_to_write(value)}",
                line,
            )
        return value

    def _evaluate(self, equation: LabelledEquation, values: list[Any]) -> Sequence[Any]:
        operation = Operation(self, equation, values)
        try:
            with equation.eqn.ctx.manager:
                return self._apply(operation)
        except RowsError as error:
            if error.line or not equation.line:
                raise
            raise RowsError(error.reason, equation.line) from None

    def _apply(self, operation: "Operation") -> Sequence[Any]:
        name = operation.name
        own = name.startswith("tpudist.")  # operations that only their rules know to evaluate
        if not operation.meets_rows and not operation.holds_rows and not own:
            return operation.bind()
        rule = self._rules(name)
        if rule is None:
            return operation.refuse_unknown()
        return rule(operation)


class Operation:
    """One equation that is evaluated, and the padded values of its operands.

    Attributes:
        evaluator: Of the whole program.
        equation: The equation.
        values: Its operands.
        params: Its parameters, labelled.
        in_dims: The dims of each operand.
        out_dims: The dims of each result.
    """

    def __init__(self, evaluator: Evaluator, equation: LabelledEquation, values: list[Any]):
        """See the class."""
        self.evaluator, self.equation, self.values = evaluator, equation, values
        self.params, self.in_dims = equation.params, equation.in_dims
        self.out_dims = equation.out_dims

    @property
    def name(self) -> str:
        """The primitive's."""
        return self.equation.eqn.primitive.name

    @property
    def out_avals(self) -> list[Any]:
        """The padded results, abstract."""
        return [v.aval for v in self.equation.eqn.outvars]

    @property
    def meets_rows(self) -> bool:
        """Whether an operand, a result or a parameter has a size that depends on rows."""
        dims = itertools.chain(*self.in_dims, *self.out_dims)
        return any(map(is_rows, dims)) or any(map(varies, self.params.values()))

    @property
    def holds_rows(self) -> bool:
        """Whether a program that it holds depends on the number of rows."""
        bodies = itertools.chain(*self.equation.bodies.values())
        return any(body.depends_on_rows for body in bodies)

    def refuse(self, why: str) -> Any:
        """Refuses: this operation cannot be followed."""
        raise RowsError(f"{self.name}: {why}", self.equation.line)

    def refuse_unknown(self) -> Any:
        """Refuses: nobody has said what this operation does with its rows."""
        called = self.equation.eqn.params.get("name")
        kernel = f" '{called}'" if isinstance(called, str) and called else ""
        raise RowsError(
            f"{self.name}{kernel}: tpudist has no rule for it on rows. If it computes each row "
            "separately, declare that at its call with tpudist.rowwise",
            self.equation.line,
        )

    def check_params(self, but: Sequence[str] = ()) -> None:
        """Refuses parameters that depend on the number of rows, but those that a rule reads."""
        for name, value in self.params.items():
            if name not in but and varies(value):
                self.refuse(f"its {name} depends on the number of rows: {_shorten(value)}")

    def size(self, dim: Dim) -> Any:
        """How large a dim really is: a traced int32, or an int."""
        return self.evaluator.size(dim)

    def need(self, dim: Dim, at_least: int) -> None:
        """Notes that a size must be so large, or the function is another one."""
        if isinstance(dim, RowSize):
            self.evaluator.needs[dim, at_least, self.equation.line, id(self.equation.eqn)] = None
        elif dim < at_least:
            self.refuse(f"it takes {at_least} of {dim}")

    def need_even(self, dim: Dim) -> None:
        """Notes that a size must be the same on all replicas."""
        if isinstance(dim, RowSize):
            self.evaluator.even.setdefault(dim, f"{self.name} ({self.equation.line})")

    def is_real(self, shape: Sequence[int], dim: int, size: Dim) -> jax.Array:
        """Which elements of a padded array lie within the real size of one of its dims."""
        return lax.broadcasted_iota(jnp.int32, tuple(shape), dim) < self.size(size)

    def mask(self, i: int, dims: Sequence[int], fill: Any) -> Any:
        """Operand `i` with `fill` beyond the real rows of these dims."""
        own = x = self.values[i]
        for dim in dims:
            size = self.in_dims[i][dim]
            if is_rows(size) and not (
                isinstance(fill, int) and fill == 0 and self.evaluator.is_masked(own, dim, size)
            ):
                x = self.evaluator.mask(x, dim, size, fill)
        return x

    def bind(self, values: Sequence[Any] | None = None, **changed: Any) -> list[Any]:
        """The operation itself, on these values or on its operands."""
        primitive = self.equation.eqn.primitive
        given = self.values if values is None else values
        # Custom derivatives are bound with functions, in jax 0.10 as arguments of their own.
        found: Any = primitive.get_bind_params({**self.equation.eqn.params, **changed})
        functions, params = found if isinstance(found, tuple) else ((), found)
        result = primitive.bind(*functions, *given, **params)
        return list(result) if primitive.multiple_results else [result]

    def run(self, body: LabelledProgram, args: Sequence[Any]) -> list[Any]:
        """Evaluates a program that it holds."""
        return self.evaluator.program(body, args)

    def body(self) -> LabelledProgram:
        """The only program that it holds."""
        bodies = list(itertools.chain(*self.equation.bodies.values()))
        if len(bodies) != 1:
            self.refuse(f"it holds {len(bodies)} programs")
        return bodies[0]


def close_over_counts(
    evaluator: Evaluator, body: LabelledProgram, args: Sequence[Any]
) -> tuple[core.Jaxpr, list[Any]]:
    """A program without constants that evaluates `body`, and the inputs to give it."""
    outer = evaluator.counts
    given = jax.tree.leaves(outer)

    def run(counts: list[Any], *args: Any) -> list[Any]:
        evaluator.counts = counts
        return evaluator.program(body, args)

    try:
        closed = jax.make_jaxpr(run)(outer, *args)
        consts = list(closed.consts)
        if consts:

            def with_consts(consts: list[Any], *args: Any) -> Any:
                return core.jaxpr_as_fun(jaxprs.ClosedJaxpr(jaxprs.open_jaxpr(closed), consts))(
                    *args
                )

            inputs = [*given, *args]
            closed = jax.make_jaxpr(with_consts)(consts, *inputs)
            if closed.consts:
                raise RowsError("a program inside has constants that cannot be made inputs")
            return jaxprs.open_jaxpr(closed), [*consts, *inputs]
    finally:
        evaluator.counts = outer
    return jaxprs.open_jaxpr(closed), [*given, *args]


def _line_of_use(labelled: LabelledProgram, variable: Any) -> str:
    """The user's line of the first operation that reads `variable`."""
    readers = (e.line for e in labelled.equations if any(x is variable for x in e.eqn.invars))
    return next(readers, "")


def _way_to_write(value: Varies) -> str:
    """Returns how to write a constant that NumPy or Python computes from the number of rows."""
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
    values = value.values if isinstance(value, Varies) else value
    arrays = (np.asarray(x).tolist() if hasattr(x, "dtype") else x for x in values)
    text = ", ".join(map(str, arrays))
    return text if len(text) < 120 else text[:117] + "..."
