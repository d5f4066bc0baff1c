"""Loops, branches and calls: what they hold is evaluated by the same rules."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpudist.programs import jaxprs
from tpudist.programs.replica_equality import EQUALIZING_FUNCTION
from tpudist.programs.rows.evaluator import Operation, Rule, close_over_counts
from tpudist.programs.rows.labels import LabelledProgram
from tpudist.programs.rows.row_sizes import is_rows


def _structure(operation: Operation, kind: type) -> Any:
    structure = jaxprs.structure_of(operation.equation.eqn)
    if not isinstance(structure, kind):
        reason = (
            structure.reason if isinstance(structure, jaxprs.Unknown) else ("it holds no program")
        )
        operation.refuse(f"the program inside it is not understood: {reason}")
    return structure


def _call(operation: Operation) -> Sequence[Any]:
    structure = _structure(operation, jaxprs.Call)
    if structure.name == EQUALIZING_FUNCTION:
        # It is known to the proof of equality by its name, and combines element by element.
        for dims in operation.in_dims:
            for dim in filter(is_rows, dims):
                operation.need_even(dim)
        return operation.bind()
    return operation.run(_body(operation, structure.body), operation.values)


def _expand(operation: Operation) -> Sequence[Any]:
    return operation.run(operation.body(), operation.values)


def _remat(operation: Operation) -> Sequence[Any]:
    structure = _structure(operation, jaxprs.Call)
    body = _body(operation, structure.body)
    jaxpr, inputs = close_over_counts(operation.evaluator, body, operation.values)
    return operation.bind(inputs, jaxpr=jaxpr)


def _branch(operation: Operation) -> Sequence[Any]:
    structure = _structure(operation, jaxprs.Cond)
    bodies = [_body(operation, body) for body in structure.bodies]
    index, *operands = operation.values

    def evaluate(body: LabelledProgram) -> Any:
        return lambda *args: [_strong(x) for x in operation.run(body, args)]

    return lax.switch(index, [evaluate(body) for body in bodies], *operands)


def _scan(operation: Operation) -> Sequence[Any]:
    scan = _structure(operation, jaxprs.Scan)
    body, params = _body(operation, scan.body), operation.equation.eqn.params
    length = operation.params["length"]
    operation.check_params(but=("length",))
    values = operation.values
    consts, carry = values[: scan.num_consts], values[scan.num_consts :][: scan.num_carry]
    xs = values[scan.num_consts + scan.num_carry :]
    counter = jnp.arange(scan.length, dtype=jnp.int32) if is_rows(length) else None
    end = operation.size(length)

    def turn(carry: list[Any], x: Any) -> Any:
        i, xs = x
        outputs = [_strong(y) for y in operation.run(body, [*consts, *carry, *xs])]
        new = outputs[: scan.num_carry]
        if is_rows(length):  # a turn for padding changes nothing
            new = [jnp.where(i < end, y, old) for y, old in zip(new, carry, strict=True)]
        return new, outputs[scan.num_carry :]

    carry, ys = lax.scan(
        turn,
        [_strong(x) for x in carry],
        (counter, list(xs)),
        scan.length,
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(operation: Operation) -> Sequence[Any]:
    loop = _structure(operation, jaxprs.While)
    cond, body = _body(operation, loop.cond), _body(operation, loop.body)
    values = operation.values
    of_cond = values[: loop.num_cond_consts]
    of_body = values[loop.num_cond_consts :][: loop.num_body_consts]
    carry = values[loop.num_cond_consts + loop.num_body_consts :]
    (dims,) = cond.out_dims

    def goes_on(carry: Any) -> Any:
        (predicate,) = operation.run(cond, [*of_cond, *carry])
        for d, size in enumerate(dims):  # under vmap there is one for each row
            if is_rows(size):
                predicate &= operation.is_real(predicate.shape, d, size)
        return predicate

    def turn(carry: Any) -> Any:
        new = [_strong(y) for y in operation.run(body, [*of_body, *carry])]
        if not dims:
            return new
        predicate = goes_on(carry)
        return [
            jnp.where(predicate.reshape(*predicate.shape, *[1] * (y.ndim - predicate.ndim)), y, old)
            for y, old in zip(new, carry, strict=True)
        ]

    start = [_strong(x) for x in carry]
    return lax.while_loop(lambda carry: jnp.any(goes_on(carry)), turn, start)


def _body(operation: Operation, jaxpr: Any) -> LabelledProgram:
    """The labelled program of one that the equation holds."""
    for bodies in operation.equation.bodies.values():
        for body in bodies:
            if body.jaxpr is jaxpr:
                return body
    return operation.refuse("the program inside it has no labels")


def _strong(x: Any) -> Any:
    """Without a weak type, which loops and branches would take for another dtype."""
    x = jnp.asarray(x) if not hasattr(x, "dtype") else x
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
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
