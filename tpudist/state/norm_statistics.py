"""Corrects Flax's normalization layers for replicas with unequal numbers of rows.

A layer with `axis_name` averages the replicas' means of their own rows. On a partial batch that is
not the mean of all rows, and it is NaN if a replica has no rows. So the trace for a partial batch
adds up sums and numbers of elements instead, and JAX differentiates the quotient. The program for
full batches is Flax's own.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import normalization as linen_normalization
from flax.nnx.nn import normalization as nnx_normalization
from jax.typing import DTypeLike

# Flax has no hook for these statistics, so its private function is replaced, with the parameters
# of the Flax versions that we support. A Flax with other parameters keeps its own function, and
# `tests/policy/test_jax_versions.py` fails.
_FUNCTION = "_compute_stats"
_KNOWN = {
    *("x", "axes", "dtype", "axis_name", "axis_index_groups", "use_mean", "use_fast_variance"),
    *("mask", "force_float32_reductions"),
}
_axes: contextvars.ContextVar[Sequence[str]] = contextvars.ContextVar("axes", default=())


@contextlib.contextmanager
def weigh_by_rows(axes: Sequence[str]) -> Iterator[None]:
    """Weighs replicas by their numbers of elements, in statistics over one of these mesh axes."""
    _install()
    token = _axes.set(axes)
    try:
        yield
    finally:
        _axes.reset(token)


@functools.cache  # the first partial batch replaces the functions, for the rest of the process
def _install() -> None:
    for module in (linen_normalization, nnx_normalization):
        function = vars(module).get(_FUNCTION)  # private to Flax: it may disappear
        if function is not None and set(inspect.signature(function).parameters) <= _KNOWN:
            setattr(module, _FUNCTION, _wrap(function))


def _wrap(compute_stats: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(compute_stats)

    @functools.wraps(compute_stats)
    def compute(*args: object, **kwargs: object) -> Any:
        axes = _axes.get()
        if axes:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            arguments = call.arguments
            name = arguments["axis_name"]
            if isinstance(name, tuple | list) and len(name) == 1:
                [name] = name
            if name in axes and arguments["axis_index_groups"] is None:
                return _statistics_of_all_rows(**arguments)
        return compute_stats(*args, **kwargs)

    return compute


def _statistics_of_all_rows(
    *,
    x: jax.Array,
    axes: int | Sequence[int],
    dtype: DTypeLike | None,
    axis_name: str,
    axis_index_groups: None,
    use_mean: bool,
    use_fast_variance: bool,
    mask: jax.Array | None = None,
    force_float32_reductions: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of the elements of all replicas, by Flax's formulas."""
    dtype = jnp.result_type(x) if dtype is None else dtype
    if force_float32_reductions:
        dtype = jnp.promote_types(dtype, jnp.float32)
    x = jnp.asarray(x, dtype)
    axes = tuple(axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes))
    where = None if mask is None else jnp.asarray(mask, bool)

    def mean(*values: jax.Array) -> list[jax.Array]:
        # Sums and count are stacked, so that they cross the mesh in one all-reduce. All values have
        # one shape and mask, and so one count.
        ones = jnp.ones(x.shape, values[0].dtype)
        sums = jnp.stack([y.sum(axes, where=where) for y in (*values, ones)])
        *totals, count = jax.lax.psum(sums, axis_name)
        return [total / count for total in totals]

    if not use_mean:
        [variance] = mean(_square(x))
        return jnp.zeros_like(variance), variance
    if use_fast_variance:
        mu, mean_square = mean(x, _square(x))
        return mu, jnp.maximum(0.0, mean_square - _square(mu))
    [mu] = mean(x)
    [variance] = mean(_square(x - jnp.expand_dims(mu, axes)))
    return mu, variance


def _square(x: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(x):
        return jax.lax.square(x)
    return jax.lax.square(jax.lax.real(x)) + jax.lax.square(jax.lax.imag(x))
