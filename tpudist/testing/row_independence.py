"""`assert_rowwise`: tests that a function computes each row independently of the others."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.programs.rows.row_kernels import Dims, dims_of_arguments, dims_of_results

Outcome = dict[str, np.ndarray]


def assert_rowwise(
    function: Callable[..., Any],
    *args: Any,
    in_dims: int | None | tuple[int | None, ...] = 0,
    out_dims: int | tuple[int, ...] = 0,
    gradient: bool = True,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> None:
    """Fails if a row of the result depends on other rows, or on the number of rows.

    The test replaces some rows by copies of the first row, or by other rows. The results of the
    unchanged rows must stay bitwise identical, and must match the results for only these rows. The
    same applies to the gradients of a sum over them. This tests the given rows; it is not a proof.

    Args:
        function: Same as in `tpudist.rowwise`.
        args: Arguments of the function, with at least two different rows.
        in_dims: Same as in `tpudist.rowwise`.
        out_dims: Same as in `tpudist.rowwise`.
        gradient: Whether to also test the gradient, with respect to all float arguments.
        rtol: Relative tolerance to results of a program for fewer rows, which may sum in another
            order.
        atol: Absolute tolerance to these results.

    Raises:
        AssertionError: If a row depends on other rows, or on the number of rows.
        ValueError: If there are fewer than two rows, or the dims do not match `in_dims` or
            `out_dims`.
    """
    leaves, tree = jax.tree.flatten(args)
    leaves = [jnp.asarray(x) for x in leaves]
    ins = dims_of_arguments(args, in_dims)
    num_rows = next((x.shape[d] for x, d in zip(leaves, ins, strict=True) if d is not None), 0)
    if num_rows < 2:
        raise ValueError(
            f"assert_rowwise needs at least two different rows, to test whether they depend on "
            f"each other, but received {num_rows}."
        )
    trial = _Trial(function, tree, ins, out_dims, gradient)
    # One row, half of them, all but one: a function that looks at its neighbors or at the size of
    # the batch differs in at least one of these cases. XLA compiles four programs: for all rows,
    # and for each of these numbers.
    for num_kept in sorted({1, num_rows // 2, num_rows - 1}):
        _check_first_rows(trial, leaves, num_kept, num_rows, rtol, atol)


def _check_first_rows(
    trial: "_Trial", leaves: list[jax.Array], num_kept: int, num_rows: int, rtol: float, atol: float
) -> None:
    """Checks that the first `num_kept` rows have the same results with other rows after them."""
    row_numbers, ins = np.arange(num_rows), trial.in_dims
    label = f"the first {num_kept} of {num_rows} rows"
    found = trial.compute(leaves, num_kept)
    # First, the other rows become copies of row 0, as in a padded batch; then rows 0, 1, ... in
    # turn. The same program runs on the same shapes, so the results must be bitwise identical.
    for source in (0, row_numbers - num_kept):
        index = np.where(row_numbers < num_kept, row_numbers, source)
        other = trial.compute(_take(leaves, ins, index), num_kept)
        for name, value in found.items():
            if not np.array_equal(value, other[name], equal_nan=value.dtype.kind in "fc"):
                raise AssertionError(
                    f"{name} for {label} depends on the other rows, so the function is not "
                    f"suitable for tpudist.rowwise."
                )
    # Another shape is another program, in which XLA may sum in another order: hence tolerances.
    alone = trial.compute(_take(leaves, ins, row_numbers[:num_kept]), num_kept)
    for name, value in found.items():
        np.testing.assert_allclose(
            _widen(value),
            _widen(alone[name]),
            rtol,
            atol,
            err_msg=f"{name} for {label} differs from the result for only these rows, so the "
            f"function is not suitable for tpudist.rowwise.",
        )


class _Trial:
    def __init__(
        self,
        function: Callable[..., Any],
        tree: jax.tree_util.PyTreeDef,
        in_dims: Dims,
        out_dims: int | tuple[int, ...],
        gradient: bool,
    ):
        self._function, self._tree = function, tree
        self.in_dims, self._out_dims, self._gradient = in_dims, out_dims, gradient
        # Set by `_call`, which `compute` traces first, without computing anything.
        self._result_dims: Dims = ()
        self._run = jax.jit(self._compute)

    def compute(self, leaves: Sequence[jax.Array], num_kept: int) -> Outcome:
        """Returns results for the first `num_kept` rows, and gradients of a sum over these."""
        shapes = jax.eval_shape(self._call, leaves)
        cotangents = [
            _cotangent(x, d, num_kept) for x, d in zip(shapes, self._result_dims, strict=True)
        ]
        results, gradients = self._run(leaves, cotangents)
        arrays = {
            f"Result {i}": _first(x, d, num_kept)
            for i, (x, d) in enumerate(zip(results, self._result_dims, strict=True))
        }
        for i, x in gradients.items():
            arrays[f"The gradient of array {i} of the arguments"] = _first(
                x, self.in_dims[i], num_kept
            )
        return arrays

    def _call(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        result = self._function(*jax.tree.unflatten(self._tree, leaves))
        self._result_dims = dims_of_results(result, self._out_dims)
        return jax.tree.leaves(result)

    def _compute(
        self, leaves: list[jax.Array], cotangents: list[jax.Array | None]
    ) -> tuple[list[jax.Array], dict[int, jax.Array]]:
        floats = {i: x for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)}
        if not (self._gradient and floats):
            return self._call(leaves), {}

        def call(floats: dict[int, jax.Array]) -> list[jax.Array]:
            return self._call([floats.get(i, x) for i, x in enumerate(leaves)])

        results, back = jax.vjp(call, floats)
        # `vjp` needs cotangents of type float0 for results without a gradient.
        zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in results]
        filled = [z if c is None else c for z, c in zip(zeros, cotangents, strict=True)]
        return results, back(filled)[0]


def _cotangent(aval: jax.ShapeDtypeStruct, dim: int | None, num_kept: int) -> jax.Array | None:
    """Returns a cotangent that is equal for any number of rows, and zero from row `num_kept` on."""
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return None
    assert dim is not None, "results have rows"
    shape = (aval.shape[dim], *aval.shape[:dim], *aval.shape[dim + 1 :])
    # Values that differ in each element: with ones, a gradient of a function such as softmax would
    # be zero and hide a dependence. Rows are the first dim while they are counted, so that row i
    # has the same values in batches of any size; they also need no random key.
    numbers = jnp.cos(jnp.arange(aval.size, dtype=jnp.float32)).reshape(shape)
    return jnp.moveaxis(numbers.at[num_kept:].set(0), 0, dim).astype(aval.dtype)


def _take(leaves: Sequence[jax.Array], dims: Dims, index: np.ndarray) -> list[jax.Array]:
    pairs = zip(leaves, dims, strict=True)
    return [x if dim is None else jnp.take(x, index, dim) for x, dim in pairs]


def _first(x: jax.Array, dim: int | None, num_kept: int) -> np.ndarray:
    return np.asarray(x if dim is None else jax.lax.slice_in_dim(x, 0, num_kept, axis=dim))


def _widen(x: np.ndarray) -> np.ndarray:
    # `assert_allclose` needs dtypes of NumPy itself, which bfloat16 and float8 are not.
    return x if x.dtype.kind in "iub" else x.astype(np.complex128 if x.dtype.kind == "c" else float)
