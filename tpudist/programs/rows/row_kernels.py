"""Functions whose owner says that they compute each row by itself: kernels, for the most part.

Nobody can read in a Pallas kernel, or in a call to a foreign library, what it does with its rows.
Its owner knows. In a trace that is labelled such a function is one operation, whose inside is not
looked at; padding goes in as a copy of a real row, and what comes out for it is padding. Its
gradient is a function of the same kind, of the operands and the cotangents. The cotangents of
padding are zeros, so it adds nothing to the gradient of an operand that all rows share.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import batching

from tpudist.programs import jaxprs
from tpudist.programs.rows.errors import RowsError

KERNEL = "tpudist.rowwise"

Function = TypeVar("Function", bound=Callable[..., Any])
Dims = tuple[int | None, ...]
Level = tuple[Dims, Dims]
"""A dim of rows: which dim of each operand it is, and which of each result. None for an operand
that all rows share, and for a result that is summed over them."""

_is_labelled = contextvars.ContextVar("tpudist_labelled", default=False)
_kernel = core.Primitive(KERNEL)
_kernel.multiple_results = True


def rowwise(
    function: Function,
    *,
    in_dims: int | None | tuple[int | None, ...] = 0,
    out_dims: int | tuple[int, ...] = 0,
) -> Function:
    """Says of a function, such as a custom kernel, that it computes each row by itself.

    Where a batch is partial, a replica function is followed over its real rows, operation by
    operation. A kernel (Pallas, a foreign function, a `jax.shard_map` of one's own) cannot be
    followed, and is refused where rows enter it. With this it is one operation, that is run on the
    padded batch: row i of each result must depend on row i of the arguments and on arguments
    without rows, and on nothing else. It must not depend on how many rows there are, nor on values
    with rows that it closes over. Padding is a copy of a real row in it, so it meets no numbers
    that it would not meet otherwise. On full batches, and outside of tpudist, it is `function`.
    `tpudist.testing.assert_rowwise` tries it out.

    Args:
        function: Takes arrays, or pytrees of arrays, by position, and returns the same.
        in_dims: Which dim of its arrays is the rows, for each argument, or one for all: None for
            an argument that all rows share.
        out_dims: Which dim is the rows, for each element of the tuple that it returns, or one for
            all that it returns.

    Returns:
        The function, which may be differentiated in reverse mode as often as `function` may, and
        vmapped. On partial batches a gradient computes the function once more, instead of saving
        what it has computed.

    Raises:
        ValueError: When it is called: the arguments or results are other ones than was said, or
            have unequal numbers of rows.

    As the `in_axes` and `out_axes` of `jax.vmap`, of a function that has its batch dims already.
    """

    @functools.wraps(function)
    def of_rows(*args: Any) -> Any:
        dims = dims_of_arguments(args, in_dims)
        leaves, tree = jax.tree.flatten(args)
        rows = _count_rows(leaves, dims)
        if not _is_labelled.get():
            result = function(*args)
            _check_results(jax.tree.leaves(result), dims_of_results(result, out_dims), rows)
            return result
        found: list[Any] = []

        def run(*leaves: Any) -> list[Any]:
            result = function(*jax.tree.unflatten(tree, leaves))
            found[:] = [jax.tree.structure(result), dims_of_results(result, out_dims)]
            return jax.tree.leaves(result)

        traced = _trace(
            run,
            leaves,
            [dims],
            lambda: [found[1]],
            [False] * len(leaves),
            _numbers_held_by(function),
        )
        results = traced.call(leaves)
        return jax.tree.unflatten(found[0], results)

    return of_rows  # type: ignore[return-value]


def dims_of_arguments(args: tuple[Any, ...], dims: int | None | tuple[int | None, ...]) -> Dims:
    """The dim of rows of each array of the arguments, from `in_dims`; not negative."""
    return _dims_of_leaves(args, dims, "argument", "in_dims")


def dims_of_results(result: Any, dims: int | tuple[int, ...]) -> Dims:
    """The dim of rows of each array of the results, from `out_dims`; not negative."""
    results = result if isinstance(dims, tuple) and isinstance(result, tuple) else (result,)
    return _dims_of_leaves(tuple(results), dims, "result", "out_dims")


@contextlib.contextmanager
def keep_whole() -> Iterator[None]:
    """Makes each function of rows one operation of what is traced, which is to be labelled."""
    token = _is_labelled.set(True)
    try:
        yield
    finally:
        _is_labelled.reset(token)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A function of rows in one trace. It is callable, of flat operands; results are a list.

    Attributes:
        run: The function.
        out_avals: Its results.
        levels: Its dims of rows: the owner's, and those that `jax.vmap` adds.
        cotangents: Which operands are cotangents, and zero for padding.
        numbers: Those that the owner's function closes over, and the sizes of arrays that it does.
    """

    run: Callable[..., Any]
    out_avals: tuple[Any, ...]
    levels: tuple[Level, ...]
    cotangents: tuple[bool, ...]
    numbers: tuple[int | float, ...]

    def __call__(self, *operands: Any) -> list[Any]:
        """The results, without a dim of rows being looked at."""
        return list(self.run(*operands))

    def bind(self, operands: Sequence[Any]) -> list[Any]:
        """One operation of a trace."""
        return _kernel.bind(
            *operands,
            kernel=self,
            levels=self.levels,
            cotangents=self.cotangents,
            numbers=self.numbers,
        )

    def differentiate(self, operands: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The cotangents of the operands; None for those that have none."""
        given = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
        come = [i for i, x in enumerate(self.out_avals) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def pull(*flat: Any) -> list[Any]:
            primals, tangents = list(flat[: len(operands)]), flat[len(operands) :]

            def run(*some: Any) -> list[Any]:
                return self(*_replace(primals, given, some))

            results, back = jax.vjp(run, *(primals[i] for i in given))
            nothing = [np.zeros(x.shape, jax.dtypes.float0) for x in results]
            return list(back(_replace(nothing, come, tangents)))

        flat = [*operands, *(cotangents[i] for i in come)]
        traced = _trace(
            pull,
            flat,
            [(*ins, *(outs[i] for i in come)) for ins, outs in self.levels],
            lambda: [tuple(ins[i] for i in given) for ins, _ in self.levels],
            [*self.cotangents, *[True] * len(come)],
            self.numbers,
        )
        return _replace([None] * len(operands), given, traced.call(flat))


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A kernel, and the values that its function closes over, which are its first operands."""

    kernel: Kernel
    consts: list[Any]

    def call(self, leaves: Sequence[Any]) -> list[Any]:
        """The results, with a gradient that is a kernel too."""
        kernel = self.kernel

        @jax.custom_vjp
        def apply(*operands: Any) -> list[Any]:
            return kernel.bind(operands)

        def forward(*operands: Any) -> tuple[list[Any], tuple[Any, ...]]:
            return apply(*operands), operands

        def backward(operands: tuple[Any, ...], cotangents: list[Any]) -> tuple[Any, ...]:
            return tuple(kernel.differentiate(operands, cotangents))

        apply.defvjp(forward, backward)
        return apply(*self.consts, *leaves)


def _trace(
    run: Callable[..., Any],
    leaves: Sequence[Any],
    in_dims: Sequence[Dims],
    out_dims: Callable[[], Sequence[Dims]],
    cotangents: Sequence[bool],
    numbers: tuple[int | float, ...],
) -> _Traced:
    """Traces a function whose dims of rows these are: of its operands, and of its results.

    Those of the results are asked for once it is traced. A kernel need not exist for no rows, so
    for none it is traced with one.
    """
    sizes = [_count_rows(leaves, dims) for dims in in_dims]
    closed = _make_jaxpr(run, _with_some_rows(leaves, in_dims))
    consts, opened = list(closed.consts), jaxprs.open_jaxpr(closed)

    def run_traced(*operands: Any) -> list[Any]:
        values, args = list(operands[: len(consts)]), operands[len(consts) :]
        return core.jaxpr_as_fun(jaxprs.ClosedJaxpr(opened, values))(*args)

    out_avals = [v.aval for v in opened.outvars]
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
    return _Traced(kernel, consts)


def _make_jaxpr(run: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    token = _is_labelled.set(False)
    try:
        closed = jax.make_jaxpr(run)(*leaves)
    finally:
        _is_labelled.reset(token)
    if closed.effects:
        raise RowsError(
            "a function passed to tpudist.rowwise has effects "
            f"({', '.join(sorted(map(str, closed.effects)))}), which padding would have too"
        )
    return closed


def _numbers_held_by(function: Any) -> tuple[int | float, ...]:
    """The numbers that a function closes over, and the sizes of the arrays that it does.

    What it computes may depend on them.
    """
    found: list[int | float] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, int | float):
            found.append(value)
            return
        if hasattr(value, "shape"):
            found.extend(value.shape)
            return
        if id(value) in seen:  # a function may close over itself
            return
        seen.add(id(value))
        for held in _contents_of(value):
            visit(held)

    visit(function)
    return tuple(found)


def _contents_of(value: Any) -> Sequence[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.isfunction(value):
        filled = [cell for cell in value.__closure__ or () if cell != types.CellType()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*(cell.cell_contents for cell in filled), *defaults]
    if hasattr(value, "__wrapped__"):
        return [value.__wrapped__]
    return () if jax.tree_util.all_leaves([value]) else jax.tree.leaves(value)


def _with_some_rows(leaves: Sequence[Any], in_dims: Sequence[Dims]) -> list[Any]:
    shapes = list(leaves)
    for i, dim in itertools.chain(*map(enumerate, in_dims)):
        if dim is not None and leaves[i].shape[dim] == 0:
            x = shapes[i]
            shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
            weak_type = jax.typeof(leaves[i]).weak_type
            shapes[i] = jax.ShapeDtypeStruct(shape, x.dtype, weak_type=weak_type)
    return shapes


def _resize(aval: Any, dim: int | None, size: int) -> Any:
    if dim is None:
        return aval
    return aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim + 1 :]))


def _replace(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    changed = dict(zip(places, new, strict=True))
    return [changed.get(i, x) for i, x in enumerate(values)]


def _dims_of_leaves(args: tuple[Any, ...], dims: Any, what: str, name: str) -> Dims:
    each = dims if isinstance(dims, tuple) else (dims,) * len(args)
    if len(each) != len(args):
        raise ValueError(
            f"A function passed to tpudist.rowwise has {len(args)} {what}s here, but {name}={dims} "
            f"is for {len(each)}. Give one dim for each, or one for all."
        )
    found: list[int | None] = []
    for arg, dim in zip(args, each, strict=True):
        for leaf in jax.tree.leaves(arg):
            rank = jnp.ndim(leaf)
            if dim is not None and not -rank <= dim < rank:
                shared = ", or use None for arrays that all rows share" if name == "in_dims" else ""
                raise ValueError(
                    f"A function passed to tpudist.rowwise has an array of shape {jnp.shape(leaf)} "
                    f"in its {what}s, which has no dim {dim} for its rows. Correct "
                    f"{name}={dims}{shared}."
                )
            found.append(None if dim is None else dim % rank)
    return tuple(found)


def _count_rows(leaves: Sequence[Any], dims: Dims) -> int:
    """How many rows the operands have."""
    pairs = zip(leaves, dims, strict=True)
    sizes = {jnp.shape(x)[dim] for x, dim in pairs if dim is not None}
    if len(sizes) != 1:
        found = " and ".join(map(str, sorted(sizes))) or "no"
        raise ValueError(
            f"The arguments of a function passed to tpudist.rowwise have {found} rows. All must "
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
    in_axes = tuple(batch_dims)  # None for what is not mapped
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
