"""Declares functions, such as kernels, that compute each row separately: `rowwise`.

tpudist cannot follow the rows inside a Pallas kernel or a call to a foreign library; its owner
declares them. In a labelled trace the function is one primitive, and `rules/kernel_rules.py` runs
it on the padded arrays.
"""

# The padding of an operand is a copy of a real row, and the rows of the results that belong to
# padding are padding again. The gradient is a function of the same kind, over the operands and the
# cotangents. The cotangents of padding are zeros, so padding adds nothing to the gradient of an
# operand that all rows share.

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import batching
from jax.typing import ArrayLike

from tpudist.array_types import PyTree
from tpudist.programs import jaxprs
from tpudist.programs.rows.closure_numbers import numbers_in_closure
from tpudist.programs.rows.errors import RowsError

KERNEL = "tpudist.rowwise"

Function = TypeVar("Function", bound=Callable[..., Any])
Dims = tuple[int | None, ...]
"""The dim of rows of each array; None for an operand that all rows share, and for a result that is
summed over the rows."""
Level = tuple[Dims, Dims]
"""The dims of one kind of rows, in the operands and in the results."""

_keeps_whole = contextvars.ContextVar("tpudist_labelled", default=False)
_calls: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("calls", default=None)
_kernel = core.Primitive(KERNEL)
_kernel.multiple_results = True


def rowwise(
    function: Function,
    *,
    in_dims: int | None | tuple[int | None, ...] = 0,
    out_dims: int | tuple[int, ...] = 0,
) -> Function:
    """Declares that a function, such as a custom kernel, computes each row separately.

    In a partial batch tpudist follows the real rows through each operation of a replica function.
    It cannot follow a kernel (Pallas, a foreign function, your own `jax.shard_map`), and raises an
    error if rows enter one. A declared function runs on the padded batch instead. Row i of each
    result must depend only on row i of the arguments and on arguments without rows: not on the
    number of rows, and not on values with rows that the function closes over. Padding is a copy of
    a real row, so the function meets no unusual numbers. On full batches, and outside of tpudist,
    the result is `function` itself. `tpudist.testing.assert_rowwise` tests the declaration.

    Args:
        function: Called with arrays or pytrees of arrays, by position; returns the same.
        in_dims: Dim of the rows in the arrays of each argument, or one dim for all; None for an
            argument that all rows share.
        out_dims: Dim of the rows in each element of the returned tuple, or one dim for all results.

    Returns:
        The function. It supports `jax.vmap`, and reverse-mode differentiation as often as
        `function` does. On partial batches a gradient computes the function once more instead of
        saving intermediate values.

    Raises:
        ValueError: If the arguments or results of a call do not match the declared dims, or have
            unequal numbers of rows.

    Similar to `in_axes` and `out_axes` of `jax.vmap`, for a function that already has batch dims.
    """

    @functools.wraps(function)
    def compute_rows(*args: PyTree) -> PyTree:
        dims = dims_of_arguments(args, in_dims)
        leaves, tree = jax.tree.flatten(args)
        rows = _count_rows(leaves, dims)
        if not _keeps_whole.get():
            if (calls := _calls.get()) is not None:
                calls.append(KERNEL)
            result = function(*args)
            _check_results(jax.tree.leaves(result), dims_of_results(result, out_dims), rows)
            return result
        structure: list[Any] = []  # of the results: their tree and dims, known after the trace

        def run(*leaves: jax.Array) -> list[Any]:
            result = function(*jax.tree.unflatten(tree, leaves))
            structure[:] = [jax.tree.structure(result), dims_of_results(result, out_dims)]
            return jax.tree.leaves(result)

        traced = _trace_kernel(
            run,
            leaves,
            [dims],
            lambda: [structure[1]],
            [False] * len(leaves),
            numbers_in_closure(function),
        )
        results = traced.call(leaves)
        return jax.tree.unflatten(structure[0], results)

    return cast(Function, compute_rows)


def dims_of_arguments(args: tuple[PyTree, ...], dims: int | None | tuple[int | None, ...]) -> Dims:
    """Returns the non-negative dim of rows of each array of the arguments, from `in_dims`."""
    return _dims_of_leaves(args, dims, "argument", "in_dims")


def dims_of_results(result: PyTree, dims: int | tuple[int, ...]) -> Dims:
    """Returns the non-negative dim of rows of each array of the results, from `out_dims`."""
    results = result if isinstance(dims, tuple) and isinstance(result, tuple) else (result,)
    return _dims_of_leaves(tuple(results), dims, "result", "out_dims")


@contextlib.contextmanager
def keep_whole() -> Iterator[None]:
    """Traces each declared function as one primitive: for traces that will be labelled."""
    token = _keeps_whole.set(True)
    try:
        yield
    finally:
        _keeps_whole.reset(token)


@contextlib.contextmanager
def note_calls() -> Iterator[list[str]]:
    """Gives a list that has elements after a call of a declared function that is not kept whole."""
    calls: list[str] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A declared function in one trace: callable with flat operands, it returns a list.

    Attributes:
        run: The function.
        out_avals: Shapes and dtypes of the results.
        levels: The dims of rows: the declared ones first, then one level for each `jax.vmap`.
        cotangents: Whether each operand is a cotangent, whose padding must be zero.
        numbers: The numbers, and the sizes of arrays, that the user's function closes over. If they
            differ between traces, the function depends on the number of rows.
    """

    run: Callable[..., Any]
    out_avals: tuple[ShapedArray, ...]
    levels: tuple[Level, ...]
    cotangents: tuple[bool, ...]
    numbers: tuple[int | float, ...]

    def __call__(self, *operands: jax.Array) -> list[Any]:
        """Returns the results for all rows, real or not."""
        return list(self.run(*operands))

    def bind(self, operands: Sequence[ArrayLike]) -> list[Any]:
        """Adds the function to a trace as one primitive."""
        return _kernel.bind(
            *operands,
            kernel=self,
            levels=self.levels,
            cotangents=self.cotangents,
            numbers=self.numbers,
        )

    def differentiate(
        self, operands: Sequence[jax.Array], cotangents: Sequence[jax.Array]
    ) -> list[Any]:
        """Returns the cotangents of the operands; None for operands that are not floats."""
        inputs = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
        outputs = [i for i, x in enumerate(self.out_avals) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def pull_back(*flat: jax.Array) -> list[Any]:
            primals, tangents = list(flat[: len(operands)]), flat[len(operands) :]

            def run(*changed: jax.Array) -> list[Any]:
                return self(*_substitute(primals, inputs, changed))

            results, backward = jax.vjp(run, *(primals[i] for i in inputs))
            # JAX requires this type for the cotangent of an integer result.
            zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in results]
            return list(backward(_substitute(zeros, outputs, tangents)))

        flat = [*operands, *(cotangents[i] for i in outputs)]
        traced = _trace_kernel(
            pull_back,
            flat,
            [(*ins, *(outs[i] for i in outputs)) for ins, outs in self.levels],
            lambda: [tuple(ins[i] for i in inputs) for ins, _ in self.levels],
            [*self.cotangents, *[True] * len(outputs)],
            self.numbers,
        )
        return _substitute([None] * len(operands), inputs, traced.call(flat))


@dataclasses.dataclass(frozen=True)
class _TracedKernel:
    """A kernel, and the values that its function closes over: the first operands."""

    kernel: Kernel
    consts: list[Any]

    def call(self, leaves: Sequence[ArrayLike]) -> list[Any]:
        """Returns the results; their gradient is a kernel too."""
        kernel = self.kernel

        @jax.custom_vjp
        def apply(*operands: jax.Array) -> list[Any]:
            return kernel.bind(operands)

        def forward(*operands: jax.Array) -> tuple[list[Any], tuple[jax.Array, ...]]:
            return apply(*operands), operands

        def backward(operands: tuple[jax.Array, ...], cotangents: list[Any]) -> tuple[Any, ...]:
            return tuple(kernel.differentiate(operands, cotangents))

        apply.defvjp(forward, backward)
        return apply(*self.consts, *leaves)


def _trace_kernel(
    run: Callable[..., Any],
    leaves: Sequence[Any],
    in_dims: Sequence[Dims],
    out_dims: Callable[[], Sequence[Dims]],
    cotangents: Sequence[bool],
    numbers: tuple[int | float, ...],
) -> _TracedKernel:
    """Traces a function of flat operands.

    Args:
        run: The function.
        leaves: The operands.
        in_dims: For each level, the dims of rows of the operands.
        out_dims: Called after the trace; returns the dims of rows of the results for each level.
        cotangents: Whether each operand is a cotangent.
        numbers: See `Kernel`.
    """
    sizes = [_count_rows(leaves, dims) for dims in in_dims]
    # A kernel need not support an empty batch: it is traced with one row then, and the sizes of
    # the results are corrected below.
    closed = _make_jaxpr(run, _with_some_rows(leaves, in_dims))
    consts, opened = list(closed.consts), jaxprs.open_jaxpr(closed)

    def run_traced(*operands: jax.Array) -> list[Any]:
        values, args = list(operands[: len(consts)]), operands[len(consts) :]
        return core.jaxpr_as_fun(jaxprs.ClosedJaxpr(opened, values))(*args)

    out_avals: list[Any] = [v.aval for v in opened.outvars]
    levels = list(zip(in_dims, out_dims(), strict=True))
    for (_, outs), size in zip(levels, sizes, strict=True):
        _check_results(out_avals, outs, max(size, 1))
        out_avals = [_resize(x, d, size) for x, d in zip(out_avals, outs, strict=True)]
    kernel = Kernel(
        run_traced,
        tuple(out_avals),
        tuple(((*[None] * len(consts), *ins), outs) for ins, outs in levels),
        (*[False] * len(consts), *cotangents),
        numbers,
    )
    return _TracedKernel(kernel, consts)


def _make_jaxpr(run: Callable[..., Any], leaves: Sequence[Any]) -> jaxprs.ClosedJaxpr:
    token = _keeps_whole.set(False)
    try:
        closed = jax.make_jaxpr(run)(*leaves)
    finally:
        _keeps_whole.reset(token)
    if closed.effects:
        raise RowsError(
            "a function passed to tpudist.rowwise has effects "
            f"({', '.join(sorted(map(str, closed.effects)))}), which padding would have too"
        )
    return closed


def _with_some_rows(leaves: Sequence[Any], in_dims: Sequence[Dims]) -> list[Any]:
    """Returns the operands, those without rows replaced by shapes with one row."""
    shapes = list(leaves)
    for i, dim in itertools.chain(*map(enumerate, in_dims)):
        if dim is not None and leaves[i].shape[dim] == 0:
            x = shapes[i]
            shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
            weak_type = jax.typeof(leaves[i]).weak_type
            shapes[i] = jax.ShapeDtypeStruct(shape, x.dtype, weak_type=weak_type)
    return shapes


def _resize(aval: ShapedArray, dim: int | None, size: int) -> ShapedArray:
    if dim is None:
        return aval
    return aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim + 1 :]))


def _substitute(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    changed = dict(zip(places, new, strict=True))
    return [changed.get(i, x) for i, x in enumerate(values)]


def _dims_of_leaves(
    args: tuple[PyTree, ...], dims: int | None | tuple[int | None, ...], role: str, name: str
) -> Dims:
    each = dims if isinstance(dims, tuple) else (dims,) * len(args)
    if len(each) != len(args):
        raise ValueError(
            f"A function passed to tpudist.rowwise has {len(args)} {role}s here, but {name}={dims} "
            f"is for {len(each)}. Give one dim for each, or one for all."
        )
    leaf_dims: list[int | None] = []
    for arg, dim in zip(args, each, strict=True):
        for leaf in jax.tree.leaves(arg):
            rank = jnp.ndim(leaf)
            if dim is not None and not -rank <= dim < rank:
                shared = ", or use None for arrays that all rows share" if name == "in_dims" else ""
                raise ValueError(
                    f"A function passed to tpudist.rowwise has an array of shape {jnp.shape(leaf)} "
                    f"in its {role}s, which has no dim {dim} for its rows. Correct "
                    f"{name}={dims}{shared}."
                )
            leaf_dims.append(None if dim is None else dim % rank)
    return tuple(leaf_dims)


def _count_rows(leaves: Sequence[Any], dims: Dims) -> int:
    pairs = zip(leaves, dims, strict=True)
    sizes = {jnp.shape(x)[dim] for x, dim in pairs if dim is not None}
    if len(sizes) != 1:
        numbers = " and ".join(map(str, sorted(sizes))) or "no"
        raise ValueError(
            f"The arguments of a function passed to tpudist.rowwise have {numbers} rows. All must "
            "have the same number, at least 1. Correct in_dims, or use None for arguments that all "
            "rows share."
        )
    return sizes.pop()


def _check_results(results: Sequence[Any], dims: Dims, rows: int) -> None:
    for x, dim in zip(results, dims, strict=True):
        if dim is not None and jnp.shape(x)[dim] != rows:
            raise ValueError(
                f"A function passed to tpudist.rowwise returns an array of shape {jnp.shape(x)} "
                f"for {rows} rows, but dim {dim} of each result must count its rows. Correct "
                "out_dims, or compute values that do not belong to one row outside of it."
            )


@_kernel.def_abstract_eval
def _(*operands, kernel, levels, cotangents, numbers):
    return list(kernel.out_avals)


def _batch(operands, batch_dims, *, kernel, levels, cotangents, numbers):
    # The rule of `jax.vmap`: the mapped axis becomes the first dim of all results, and one more
    # level of rows. The dims of the other levels move up where it is inserted before them.
    in_axes = tuple(batch_dims)
    size = next(x.shape[d] for x, d in zip(operands, in_axes, strict=True) if d is not None)

    def shift(dims: Dims, by: Sequence[int | None]) -> Dims:
        return tuple(
            d if d is None or b is None or d < b else d + 1 for d, b in zip(dims, by, strict=True)
        )

    zeros = (0,) * len(kernel.out_avals)
    batched = dataclasses.replace(
        kernel,
        run=jax.vmap(kernel.run, in_axes=in_axes),
        out_avals=tuple(x.update(shape=(size, *x.shape)) for x in kernel.out_avals),
        levels=(*((shift(i, in_axes), shift(o, zeros)) for i, o in levels), (in_axes, zeros)),
    )
    return batched.bind(operands), zeros


batching.primitive_batchers[_kernel] = _batch
