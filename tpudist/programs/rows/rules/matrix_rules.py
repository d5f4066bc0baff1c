"""Rules of matrix decompositions and solvers, whose matrices may have rows as a dim.

The padding of matrices `[rows, rows]` becomes a block of the identity, which no pivot mixes with
the real block. The padding of tall matrices `[rows, columns]` becomes zeros, which change no
column. If that does not determine the result (eigenvectors, singular vectors and their signs), the
operation is rejected.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from tpudist.programs import equation_layouts
from tpudist.programs.jaxpr_structure import Elementary
from tpudist.programs.rows.evaluator import Operation, Rule
from tpudist.programs.rows.row_sizes import is_rows

_REFUSED = "its matrices have rows as one of their two dims; rows must be a dim before these"


def _each_matrix(operation: Operation) -> Sequence[Any]:
    """Computes each matrix of the last two dims separately."""
    operation.check_params()
    for dims in (*operation.in_dims, *operation.out_dims):
        if any(map(is_rows, dims[-2:])):
            operation.refuse(_REFUSED)
    return operation.bind()


def _embed(operation: Operation, i: int) -> Any:
    """Returns square matrices with the identity in their padding."""
    x, (rows, columns) = operation.values[i], operation.in_dims[i][-2:]
    if not is_rows(rows):
        return x
    if rows != columns:
        operation.refuse("its matrices have rows as one of their two dims, and are not square")
    n = x.ndim
    real = operation.is_real(x.shape, n - 2, rows) & operation.is_real(x.shape, n - 1, rows)
    return jnp.where(real, x, jnp.eye(x.shape[-1], dtype=x.dtype))


def _cholesky(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    return operation.bind([_embed(operation, 0)])


def _solve_triangular(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    b = operation.values[1]
    along = b.ndim - (2 if operation.params["left_side"] else 1)
    return operation.bind([_embed(operation, 0), operation.mask(1, [along], 0)])


def _lu(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    rows, columns = operation.in_dims[0][-2:]
    if is_rows(rows) and not is_rows(columns):
        # A zero is not a pivot: a real row has a larger element, or comes first among zeros.
        return operation.bind([_zero_rows(operation)])
    if is_rows(columns) and not is_rows(rows):
        operation.refuse("its matrices have as many columns as there are rows")
    return operation.bind([_embed(operation, 0)])


def _lu_permutation(operation: Operation) -> Sequence[Any]:
    operation.check_params(allowed=("permutation_size",))
    pivots = operation.values[0]
    last = pivots.ndim - 1
    size = operation.in_dims[0][last]
    if is_rows(size):
        # Pivots of the padding exchange each row with itself.
        places = lax.broadcasted_iota(pivots.dtype, pivots.shape, last)
        pivots = jnp.where(operation.is_real(pivots.shape, last, size), pivots, places)
    return operation.bind([pivots])


def _qr(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    rows, columns = operation.in_dims[0][-2:]
    if not is_rows(rows) and not is_rows(columns):
        return operation.bind()
    params = operation.params
    if is_rows(columns) or params["full_matrices"] or params.get("pivoting"):
        operation.refuse("only the reduced factors of matrices [rows, columns] are supported")
    assert isinstance(columns, int), columns
    operation.require_size(rows, columns)
    return operation.bind([_zero_rows(operation)])


def _svd(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    dims = operation.in_dims[0][-2:]
    if not any(map(is_rows, dims)):
        return operation.bind()
    if operation.params["compute_uv"]:
        operation.refuse(
            "the signs of singular vectors depend on the padded shape: only singular values "
            "without their gradient are supported"
        )
    if all(map(is_rows, dims)):
        operation.refuse("its matrices have rows as both of their dims")
    rows, fixed = sorted(dims, key=is_rows, reverse=True)
    assert isinstance(fixed, int), fixed
    operation.require_size(rows, fixed)
    ndim = operation.values[0].ndim
    return operation.bind([operation.mask(0, [ndim - 2, ndim - 1], 0)])


def _zero_rows(operation: Operation) -> Any:
    return operation.mask(0, [operation.values[0].ndim - 2], 0)


def _solve_linear(operation: Operation) -> Sequence[Any]:
    # Evaluates the program that solves. The others belong to derivatives, which JAX has computed.
    operation.check_params()
    structure = equation_layouts.structure_of(operation.equation.eqn)
    if not isinstance(structure, Elementary):
        operation.refuse("the program inside it is not understood")
    (solve,) = structure.bodies
    body = next(body for body in operation.equation.all_bodies if body.jaxpr is solve)
    lengths = operation.equation.eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    consts = operation.values[first : first + lengths.solve]
    return operation.evaluate(body, [*consts, *operation.values[sum(lengths) :]])


_OTHERS = "eig eigh geqrf householder_product schur tridiagonal tridiagonal_solve"

RULES: dict[str, Rule] = {
    **dict.fromkeys(_OTHERS.split(), _each_matrix),
    "cholesky": _cholesky,
    "custom_linear_solve": _solve_linear,
    "lu": _lu,
    "lu_pivots_to_permutation": _lu_permutation,
    "qr": _qr,
    "svd": _svd,
    "triangular_solve": _solve_triangular,
}
