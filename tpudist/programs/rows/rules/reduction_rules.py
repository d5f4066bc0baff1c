"""Rules of reductions, sorts and other operations over rows: padding becomes neutral elements.

A neutral element changes no result: 0 for a sum, -inf for a maximum. Each rule puts it into the
padding (`Operation.mask`, which skips dims without rows), and then applies JAX's operation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tpudist.programs.rows.contractions import dims_of_sums
from tpudist.programs.rows.evaluator import Operation, Rule
from tpudist.programs.rows.row_sizes import is_rows


def _lowest(dtype: DTypeLike) -> Any:
    """Returns the neutral element of a maximum."""
    if dtype == jnp.bool_:
        return False
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(-jnp.inf, -jnp.inf)  # JAX compares the real parts first
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype: DTypeLike) -> Any:
    """Returns the neutral element of a minimum."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).max
    return True if dtype == jnp.bool_ else -_lowest(dtype)


_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": _lowest,
    "min": _highest,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "and": lambda dtype: ~jnp.zeros((), dtype),  # all bits set
    "logsumexp": _lowest,
}


def _reduce(kind: str) -> Rule:
    def rule(operation: Operation) -> Sequence[Any]:
        operation.check_params()
        x, dims, axes = operation.values[0], operation.in_dims[0], operation.params["axes"]
        fill = _NEUTRAL[kind](x.dtype)
        masked = {a for a in axes if operation.needs_mask(0, a, fill)}
        inner = [a for a in axes if not is_rows(dims[a])]
        if not masked or math.prod(x.shape[a] for a in inner) == 1:
            return operation.bind([operation.mask(0, axes, fill)])
        # First the dims without rows: the padding is still apart, and the mask is much smaller.
        # Not all compilers fuse a mask of the whole operand into the reduction.
        [x] = operation.bind(axes=tuple(inner))
        kept = [a for a in range(len(dims)) if a not in inner]
        for a in masked:
            x = operation.evaluator.mask(x, kept.index(a), dims[a], fill)
        return operation.bind([x], axes=tuple(i for i, a in enumerate(kept) if a in axes))

    return rule


def _accumulate(kind: str) -> Rule:
    def rule(operation: Operation) -> Sequence[Any]:
        operation.check_params()
        # Forward, the padding comes after all real rows. In reverse it comes first.
        axes = [operation.params["axis"]] if operation.params["reverse"] else []
        fill = _NEUTRAL[kind](operation.values[0].dtype)
        return operation.bind([operation.mask(0, axes, fill)])

    return rule


def _find_extreme(neutral: Callable[[Any], Any]) -> Rule:
    def rule(operation: Operation) -> Sequence[Any]:
        operation.check_params()
        axes, x = operation.params["axes"], operation.values[0]
        if not any(is_rows(operation.in_dims[0][axis]) for axis in axes):
            return operation.bind()
        if len(axes) > 1:
            operation.refuse("it finds the position of the extreme over several dims")
        # The first of equal values wins, and the real rows come first. A NaN wins over all values.
        return operation.bind([operation.mask(0, axes, neutral(x.dtype))])

    return rule


def _reduce_by_function(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    count = len(operation.values) // 2
    values = list(operation.values)
    for i in range(count):
        if values[count + i].shape:
            operation.refuse("its initial values are not scalars")
        # `lax.reduce` requires that its initial value is neutral.
        values[i] = operation.mask(i, operation.params["dimensions"], values[count + i])
    return operation.bind(values)


def _dot(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    summed = dims_of_sums(operation.equation)
    # Both operands, since 0 times NaN is NaN.
    return operation.bind([operation.mask(i, summed.get(i, ()), 0) for i in range(2)])


def _reduce_window(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    params, dims = operation.params, operation.in_dims[0]
    ones = (1,) * len(dims)
    for d, size in enumerate(dims):
        is_identity = (
            params["window_dimensions"][d] == 1
            and params["window_strides"][d] == 1
            and tuple(params["padding"][d]) == (0, 0)
            and (params.get("base_dilation") or ones)[d] == 1
            and (params.get("window_dilation") or ones)[d] == 1
        )
        if is_rows(size) and not is_identity:
            kind = operation.name.removeprefix("reduce_window_")
            # Only names with the prefix contain the operation in a window.
            if kind not in _NEUTRAL or kind == operation.name:
                operation.refuse("its window has several rows")
            fill = _NEUTRAL[kind](operation.values[0].dtype)
            return operation.bind([operation.mask(0, range(len(dims)), fill)])
    return operation.bind()


def _fourier_transform(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    count = len(operation.params["fft_lengths"])
    along = (*operation.in_dims[0][-count:], *operation.out_dims[0][-count:])
    if count and any(map(is_rows, along)):
        operation.refuse("it transforms along the rows")
    return operation.bind()


def _sort(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    params, axis = operation.params, operation.params["dimension"]
    size = operation.in_dims[0][axis]
    if not is_rows(size):
        return operation.bind()
    # A flag for padding is the first key. An extreme value as key would tie with real values, and
    # NaN sorts after it.
    first = operation.values[0]
    padding = jnp.logical_not(operation.is_real(first.shape, axis, size)).astype(jnp.int32)
    _, *results = lax.sort(
        [padding, *operation.values],
        dimension=axis,
        is_stable=params["is_stable"],
        num_keys=params["num_keys"] + 1,
    )
    return results


def _top_k(operation: Operation) -> Sequence[Any]:
    operation.check_params()
    axis = operation.params.get("axis", -1) % len(operation.in_dims[0])
    operation.require_size(operation.in_dims[0][axis], operation.params["k"])
    x = operation.values[0]
    return operation.bind([operation.mask(0, [axis], _lowest(x.dtype))])


RULES: dict[str, Rule] = {
    **{
        f"reduce_{kind}": _reduce(kind)
        for kind in ("sum", "prod", "max", "min", "or", "xor", "and")
    },
    **{f"cum{kind}": _accumulate(kind) for kind in ("sum", "prod", "max", "min", "logsumexp")},
    "argmax": _find_extreme(_lowest),
    "argmin": _find_extreme(_highest),
    "reduce": _reduce_by_function,
    "dot_general": _dot,
    "reduce_window": _reduce_window,
    "reduce_window_sum": _reduce_window,
    "reduce_window_max": _reduce_window,
    "reduce_window_min": _reduce_window,
    "select_and_scatter": _reduce_window,
    "select_and_scatter_add": _reduce_window,
    "select_and_gather_add": _reduce_window,
    "fft": _fourier_transform,
    "sort": _sort,
    "top_k": _top_k,
}
