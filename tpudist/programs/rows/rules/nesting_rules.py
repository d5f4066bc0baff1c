"""Rules of loops, branches and calls: the programs inside are evaluated by the same rules."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.typing import ArrayLike

from tpudist.programs import equation_layouts, jaxprs
from tpudist.programs.jaxpr_structure import Call, Cond, Scan, Structure, Unknown, While
from tpudist.programs.replica_equality import EQUALIZING_FUNCTION
from tpudist.programs.rows.errors import RowsError
from tpudist.programs.rows.evaluator import Evaluator, Operation, Rule
from tpudist.programs.rows.labels import LabelledProgram
from tpudist.programs.rows.row_sizes import is_rows

StructureType = TypeVar("StructureType", bound=Structure)


def _structure(operation: Operation, expected: type[StructureType]) -> StructureType:
    structure = equation_layouts.structure_of(operation.equation.eqn)
    if isinstance(structure, expected):
        return structure
    reason = "it contains no program"
    if isinstance(structure, Unknown):
        reason = structure.reason
    operation.refuse(f"the program inside it is not understood: {reason}")


def _call(operation: Operation) -> Sequence[Any]:
    structure = _structure(operation, Call)
    if structure.name == EQUALIZING_FUNCTION:
        # The proof of equality knows this function by its name, so it stays a call. It combines
        # replicas element by element.
        for dims in operation.in_dims:
            for dim in filter(is_rows, dims):
                operation.require_equal(dim)
        return operation.bind()
    return operation.evaluate(_body(operation, structure.body), operation.values)


def _expand(operation: Operation) -> Sequence[Any]:
    return operation.evaluate(operation.body(), operation.values)


def _remat(operation: Operation) -> Sequence[Any]:
    structure = _structure(operation, Call)
    body = _body(operation, structure.body)
    jaxpr, inputs = _pass_counts_as_inputs(operation.evaluator, body, operation.values)
    return operation.bind(inputs, jaxpr=jaxpr)


def _pass_counts_as_inputs(
    evaluator: Evaluator, body: LabelledProgram, args: Sequence[ArrayLike]
) -> tuple[core.Jaxpr, list[Any]]:
    """Returns a program without constants that evaluates `body`, and its inputs.

    `checkpoint` needs that: its program is evaluated again for the gradients, and has no place for
    the traced counts that the rules close over. So they are inputs here.
    """
    outer = evaluator.counts
    counts = jax.tree.leaves(outer)

    def run(counts: list[Any], *args: jax.Array) -> list[Any]:
        evaluator.counts = counts
        return evaluator.program(body, args)

    try:
        closed = jax.make_jaxpr(run)(outer, *args)
        consts = list(closed.consts)
        if consts:

            def with_consts(consts: list[Any], *args: jax.Array) -> Any:
                program = jaxprs.ClosedJaxpr(jaxprs.open_jaxpr(closed), consts)
                return core.jaxpr_as_fun(program)(*args)

            inputs = [*counts, *args]
            # Arrays that the trace has created, such as the seeds of keys, become inputs too.
            closed = jax.make_jaxpr(with_consts)(consts, *inputs)
            if closed.consts:
                raise RowsError("a program inside has constants that cannot be made inputs")
            return jaxprs.open_jaxpr(closed), [*consts, *inputs]
    finally:
        evaluator.counts = outer
    return jaxprs.open_jaxpr(closed), [*counts, *args]


def _branch(operation: Operation) -> Sequence[Any]:
    structure = _structure(operation, Cond)
    bodies = [_body(operation, body) for body in structure.bodies]
    index, *operands = operation.values

    def make_branch(body: LabelledProgram) -> Callable[..., list[jax.Array]]:
        return lambda *args: [_with_strong_type(x) for x in operation.evaluate(body, args)]

    # As `cond`, it clamps the index.
    return lax.switch(index, [make_branch(body) for body in bodies], *operands)


def _scan(operation: Operation) -> Sequence[Any]:
    scan = _structure(operation, Scan)
    body, params = _body(operation, scan.body), operation.equation.eqn.params
    length = operation.params["length"]
    operation.check_params(allowed=("length",))
    values = operation.values
    consts, carry = values[: scan.num_consts], values[scan.num_consts :][: scan.num_carry]
    xs = values[scan.num_consts + scan.num_carry :]
    counter = jnp.arange(scan.length, dtype=jnp.int32) if is_rows(length) else None
    end = operation.size(length)

    def step(carry: list[Any], x: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        i, xs = x  # `i` is None unless the scan is over rows
        outputs = [_with_strong_type(y) for y in operation.evaluate(body, [*consts, *carry, *xs])]
        new = outputs[: scan.num_carry]
        if is_rows(length):
            # A scan over rows makes an iteration for each padded row, which leaves the carry as it
            # is. In a reverse scan these come first and the carry is still the initial one.
            new = [jnp.where(i < end, y, old) for y, old in zip(new, carry, strict=True)]
        return new, outputs[scan.num_carry :]

    carry, ys = lax.scan(
        step,
        [_with_strong_type(x) for x in carry],
        (counter, list(xs)),
        scan.length,
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(operation: Operation) -> Sequence[Any]:
    loop = _structure(operation, While)
    cond, body = _body(operation, loop.cond), _body(operation, loop.body)
    values = operation.values
    of_cond = values[: loop.num_cond_consts]
    of_body = values[loop.num_cond_consts :][: loop.num_body_consts]
    carry = values[loop.num_cond_consts + loop.num_body_consts :]
    (dims,) = cond.out_dims

    # Under `vmap` a while loop has a predicate per row. It ends when all real rows have ended: a
    # padded row never continues, or the loop might not end. A row that has ended keeps its carry.
    def find_running(carry: Sequence[Any]) -> jax.Array:
        (predicate,) = operation.evaluate(cond, [*of_cond, *carry])
        for d, size in enumerate(dims):
            if is_rows(size):
                predicate &= operation.is_real(predicate.shape, d, size)
        return predicate

    def step(carry: list[Any]) -> list[Any]:
        new = [_with_strong_type(y) for y in operation.evaluate(body, [*of_body, *carry])]
        if not dims:
            return new
        running = find_running(carry)
        return [
            jnp.where(running.reshape(*running.shape, *[1] * (y.ndim - running.ndim)), y, old)
            for y, old in zip(new, carry, strict=True)
        ]

    start = [_with_strong_type(x) for x in carry]
    return lax.while_loop(lambda carry: jnp.any(find_running(carry)), step, start)


def _body(operation: Operation, jaxpr: core.Jaxpr) -> LabelledProgram:
    """Returns the labels of a program inside the equation."""
    for body in operation.equation.all_bodies:
        if body.jaxpr is jaxpr:
            return body
    operation.refuse("the program inside it has no labels")


def _with_strong_type(x: ArrayLike) -> jax.Array:
    # Loops and branches reject a carry or result whose weak type differs from the original's.
    x = jnp.asarray(x) if isinstance(x, bool | int | float | complex) else x
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys
        return x
    return lax.convert_element_type(x, x.dtype)


_CALLS = """
    jit pjit closed_call core_call eval_jaxpr custom_jvp_call custom_vjp_call custom_vmap_call
    linear_call composite xla_metadata_call remat_opt
"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_CALLS.split(), _call),
    **dict.fromkeys(("remat2", "checkpoint", "remat"), _remat),
    "call_hi_primitive": _expand,
    "cond": _branch,
    "scan": _scan,
    "while": _while,
}
