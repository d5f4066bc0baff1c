"""Collectives between replicas, for use inside a replica function, on pytrees of arrays.

Replicas communicate along the manual axis `replica` (see `mesh`). On CPU, 16-bit floats are sent as
float32, because XLA:CPU aborts the process on a 16-bit `psum` in a partly manual function.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike

from tpudist.array_types import PyTree
from tpudist.reduce_op import ReduceOp
from tpudist.xla.mesh import REPLICA_AXIS
from tpudist.xla.packing import Communicate, Packing

_EXTREMES = {ReduceOp.MIN: jax.lax.pmin, ReduceOp.MAX: jax.lax.pmax}
# Axis of replicas that run eagerly, in threads of their own (`run.eager`); None in a trace.
_eager_axis: contextvars.ContextVar[str | None] = contextvars.ContextVar("eager", default=None)


@contextlib.contextmanager
def run_over(axis: str) -> Iterator[None]:
    """Sets the axis over which eager replicas communicate, in this context."""
    token = _eager_axis.set(axis)
    try:
        yield
    finally:
        _eager_axis.reset(token)


def replica_axis() -> str:
    """Returns the axis over which replicas communicate in this context."""
    return _eager_axis.get() or REPLICA_AXIS


def replica_id() -> jax.Array:
    """Returns the number of this replica, int32."""
    return jax.lax.axis_index(replica_axis()) if num_replicas() > 1 else jnp.int32(0)


def num_replicas() -> int:
    """Returns the number of replicas that run this function."""
    return jax.lax.axis_size(replica_axis())


def all_reduce(op: ReduceOp, value: PyTree, packing: Packing | None = None) -> PyTree:
    """Combines `value` over all replicas; every replica gets the same result.

    All leaves share a collective unless `packing` divides them. A `MEAN` of integers is a float, as
    with `jnp.mean`. The gradient of an all-reduce by `SUM` or `MEAN` is the same all-reduce of the
    upstream gradients.

    Cost: each of n replicas sends 2 (n - 1) / n times the bytes of `value`, if XLA picks a ring.
    """
    value = widen_for_mean(op, value)
    reduced = run_collective(lambda x: combine(op, x), value, packing)
    return divide_by_replicas(reduced) if op is ReduceOp.MEAN else reduced


def combine(op: ReduceOp, arrays: PyTree, groups: list[list[int]] | None = None) -> PyTree:
    """Returns sums (also for `MEAN`), minima or maxima over all replicas or within `groups`."""
    axis = replica_axis()
    if op in _EXTREMES:
        return _EXTREMES[op](arrays, axis, axis_index_groups=groups)
    return _add_up(lambda parts: jax.lax.psum(parts, axis, axis_index_groups=groups), arrays)


def _add_up(communicate: Callable[[PyTree], PyTree], arrays: PyTree) -> PyTree:
    # XLA:CPU ends the process for the sum of a complex constant (jaxlib 0.10.2 and 0.12.0.1), so
    # real and imaginary parts are summed separately there.
    def is_split(x):
        return jnp.issubdtype(x.dtype, jnp.complexfloating) and platform() == "cpu"

    sent = jax.tree.map(lambda x: (x.real, x.imag) if is_split(x) else x, arrays)
    return jax.tree.map(
        lambda x, summed: jax.lax.complex(*summed) if is_split(x) else summed,
        arrays,
        communicate(sent),
    )


def widen_for_mean(op: ReduceOp, value: PyTree) -> PyTree:
    """Converts integers to floats for a `MEAN`, because their sum might overflow their dtype."""
    if op is not ReduceOp.MEAN:
        return value
    return jax.tree.map(
        lambda x: x if _is_inexact(x) else jnp.asarray(x, jnp.result_type(float)), value
    )


def divide_by_replicas(summed: PyTree) -> PyTree:
    """Divides sums over all replicas, whose operands were results of `widen_for_mean`."""
    n = num_replicas()
    return jax.tree.map(lambda x: x / jnp.asarray(n, mean_dtype(x)), summed)


def all_gather(value: PyTree, axis: int, packing: Packing | None = None) -> PyTree:
    """Concatenates the replicas' values along dim `axis`; every replica gets the result.

    All leaves share a collective unless `packing` divides them. The gradient of a replica is its
    part of the sum of all upstream gradients.

    Cost: each of n replicas receives n - 1 times the bytes of `value`.
    """

    def gather(x):
        return jax.lax.all_gather(x, replica_axis(), axis=_dim(x, axis, "all_gather"), tiled=True)

    def communicate(leaves):
        return [gather(x) for x in leaves]

    return run_collective(communicate, value, packing, joins=False)


def reduce_scatter(op: ReduceOp, value: PyTree, axis: int) -> PyTree:
    """Combines `value` over n replicas; each gets its part of n equal parts of dim `axis`.

    Raises:
        ValueError: If `op` is neither SUM nor MEAN, or the dim is not a multiple of n.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"reduce_scatter({op}) is not supported: it combines only by SUM or MEAN.")
    n = num_replicas()

    def scatter(x):
        dim = _dim(x, axis, "reduce_scatter")
        if x.shape[dim] % n:
            raise ValueError(
                f"reduce_scatter splits dim {axis} of a value of shape {x.shape} over {n} "
                f"replicas, but {x.shape[dim]} is not a multiple of {n}. Pad it first."
            )
        axis_name = replica_axis()
        x = widen_for_mean(op, x)
        x = _add_up(
            lambda x: jax.lax.psum_scatter(x, axis_name, scatter_dimension=dim, tiled=True), x
        )
        return x / jnp.asarray(n, mean_dtype(x)) if op is ReduceOp.MEAN else x

    return run_collective(lambda leaves: [scatter(x) for x in leaves], value)


def broadcast(value: PyTree, source: int = 0) -> PyTree:
    """Returns the value of replica `source` on every replica.

    Cost: same as an all-reduce by `SUM`.
    """
    me = replica_id()

    def mask(x):
        # Replaced by zeros, because a product with 0 would keep a NaN of another replica.
        return jnp.where(me == source, x, jnp.zeros_like(x))

    bools = jax.tree.map(lambda x: jnp.result_type(x) == jnp.bool_, value)
    as_numbers = jax.tree.map(lambda x, b: jnp.asarray(x, jnp.int8) if b else x, value, bools)
    summed = all_reduce(ReduceOp.SUM, jax.tree.map(mask, as_numbers))
    return jax.tree.map(lambda x, b: x.astype(jnp.bool_) if b else x, summed, bools)


def run_collective(
    communicate: Communicate,
    value: PyTree,
    packing: Packing | None = None,
    *,
    joins: bool = True,
) -> PyTree:
    """Applies `communicate` to the leaves, or to the leaves of each pack.

    Args:
        communicate: Called with the leaves of one collective; returns arrays of the same shapes.
        value: Pytree of arrays, which is returned if there is one replica.
        packing: Division of the leaves; by default all are in one pack.
        joins: Whether `communicate` also works on one flat array with several leaves.
    """
    leaves, treedef = jax.tree.flatten(value)
    leaves = [jnp.asarray(x) for x in leaves]
    if num_replicas() == 1:
        # XLA rejects collectives over a manual axis of one device next to automatic axes.
        return jax.tree.unflatten(treedef, leaves)
    if _eager_axis.get() is not None:
        communicate = _trace_first(communicate)
    dtypes = [x.dtype for x in leaves]
    on_cpu = platform() == "cpu"
    sent = [x.astype(jnp.float32) if on_cpu and is_16_bit_float(x.dtype) else x for x in leaves]
    if packing is not None:
        # XLA:CPU's combiner is off then (`Packing.compiler_options`), so arrays are joined here.
        received = packing.apply(communicate, sent, joins and on_cpu)
    else:
        received = communicate(sent) if sent else []
    return jax.tree.unflatten(
        treedef,
        [
            y.astype(dtype) if y.dtype == jnp.float32 and is_16_bit_float(dtype) else y
            for y, dtype in zip(received, dtypes, strict=True)
        ],
    )


def _trace_first(communicate: Communicate) -> Communicate:
    # Eagerly, JAX treats a value that is not traced as equal on all replicas, and simplifies a
    # collective of it. So the collectives are traced first and then evaluated.
    def evaluate(leaves: list[jax.Array]) -> list[jax.Array]:
        traced = jax.make_jaxpr(lambda leaves: list(communicate(leaves)))(leaves)
        return core.jaxpr_as_fun(traced)(*leaves)

    return evaluate


def is_16_bit_float(dtype: DTypeLike) -> bool:
    """Whether values of `dtype` are floats of at most 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2


def mean_dtype(x: jax.Array) -> np.dtype:
    """Returns the dtype of a mean: that of `x`; for integers JAX's float (float32 without x64)."""
    return x.dtype if _is_inexact(x) else jnp.result_type(float)


def _is_inexact(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def platform() -> str:
    """Returns the platform of the mesh in the current trace; otherwise JAX's default platform."""
    # A program for a described TPU is traced in a process whose own devices are CPUs.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _dim(x: jax.Array, axis: int, function: str) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{function}(axis={axis}): the value has shape {x.shape}, with {x.ndim} dim(s). Use an "
            "axis of the value; a scalar has none: add one with x[None]."
        )
    return axis % x.ndim
