"""What replicas say to each other, inside a replica function. Pytrees in, pytrees out.

Communication happens along the manual axis `replica` (see `mesh`). On CPU, 16-bit floats travel as
float32: XLA:CPU aborts the process on a 16-bit `psum` in a partly manual function.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from tpudist.array_types import PyTree
from tpudist.reduce_op import ReduceOp
from tpudist.xla.mesh import REPLICA_AXIS
from tpudist.xla.packing import Packing

_EXTREMES = {ReduceOp.MIN: jax.lax.pmin, ReduceOp.MAX: jax.lax.pmax}
# The axis of replicas that run one by one, each with arrays whose values are known.
_eager_axis: contextvars.ContextVar[str | None] = contextvars.ContextVar("eager", default=None)


@contextlib.contextmanager
def run_over(axis: str) -> Iterator[None]:
    """Lets replicas communicate over another axis, on which they are not traced together."""
    token = _eager_axis.set(axis)
    try:
        yield
    finally:
        _eager_axis.reset(token)


def replica_axis() -> str:
    """The axis over which replicas communicate here."""
    return _eager_axis.get() or REPLICA_AXIS


def replica_id() -> jax.Array:
    """The number of this replica, int32."""
    return jax.lax.axis_index(replica_axis()) if num_replicas() > 1 else jnp.int32(0)


def num_replicas() -> int:
    """How many replicas run this function."""
    return jax.lax.axis_size(replica_axis())


def all_reduce(op: ReduceOp, value: PyTree, packing: Packing | None = None) -> PyTree:
    """Combines `value` over all replicas; every replica gets the same result.

    All leaves travel together, or as `packing` says. `MEAN` of integers is a float, as with
    `jnp.mean`. The gradient of an all-reduce by `SUM` or `MEAN` is the same all-reduce of the
    upstream gradients.

    Cost: each of n replicas sends 2 (n - 1) / n times the bytes of `value`, if XLA picks a ring.
    """
    value = widen_for_mean(op, value)
    reduced = run_collective(lambda x: combine(op, x), value, packing)
    return divide_by_replicas(reduced) if op is ReduceOp.MEAN else reduced


def combine(op: ReduceOp, arrays: Any, groups: list[list[int]] | None = None) -> Any:
    """Arrays summed (for `MEAN` too), or their minima or maxima, over replicas or `groups`."""
    axis = replica_axis()
    if op in _EXTREMES:
        return _EXTREMES[op](arrays, axis, axis_index_groups=groups)
    return _add_up(lambda parts: jax.lax.psum(parts, axis, axis_index_groups=groups), arrays)


def _add_up(communicate: Callable[[Any], Any], arrays: Any) -> Any:
    """Sums by `communicate`; on CPU those of complex numbers as two of floats.

    XLA:CPU ends the process over the sum of a complex constant (jaxlib 0.10.2 and 0.12.0.1).
    """

    def is_split(x):
        return jnp.issubdtype(x.dtype, jnp.complexfloating) and platform() == "cpu"

    sent = jax.tree.map(lambda x: (x.real, x.imag) if is_split(x) else x, arrays)
    return jax.tree.map(
        lambda x, summed: jax.lax.complex(*summed) if is_split(x) else summed,
        arrays,
        communicate(sent),
    )


def widen_for_mean(op: ReduceOp, value: PyTree) -> PyTree:
    """Makes integers floats if they are to be averaged: their sum might not fit their dtype."""
    if op is not ReduceOp.MEAN:
        return value
    return jax.tree.map(
        lambda x: x if _is_inexact(x) else jnp.asarray(x, jnp.result_type(float)), value
    )


def divide_by_replicas(summed: PyTree) -> PyTree:
    """Sums over all replicas of what `widen_for_mean` gave, as means."""
    n = num_replicas()
    return jax.tree.map(lambda x: x / jnp.asarray(n, mean_dtype(x)), summed)


def all_gather(value: PyTree, axis: int, packing: Packing | None = None) -> PyTree:
    """Concatenates the replicas' values along dim `axis`; every replica gets all.

    All leaves travel together, or as `packing` says.

    The gradient is the sum over replicas of the upstream gradients, of which each keeps its part.

    Cost: each of n replicas receives n - 1 times the bytes of `value`.
    """

    def gather(x):
        return jax.lax.all_gather(x, replica_axis(), axis=_dim(x, axis, "all_gather"), tiled=True)

    def communicate(leaves):
        return [gather(x) for x in leaves]

    return run_collective(communicate, value, packing, joins=False)


def reduce_scatter(op: ReduceOp, value: PyTree, axis: int) -> PyTree:
    """Combines `value` over replicas; each keeps its own of n equal parts of dim `axis`.

    Raises:
        ValueError: `op` is neither SUM nor MEAN, or the dim does not divide by the replicas.
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
    """Gives every replica the value that replica `source` has.

    Cost: that of an all-reduce by `SUM`.
    """
    me = replica_id()

    def mask(x):
        # Replaced, and not multiplied by 0, which a NaN of another replica would survive.
        return jnp.where(me == source, x, jnp.zeros_like(x))

    bools = jax.tree.map(lambda x: jnp.result_type(x) == jnp.bool_, value)
    as_numbers = jax.tree.map(lambda x, b: jnp.asarray(x, jnp.int8) if b else x, value, bools)
    summed = all_reduce(ReduceOp.SUM, jax.tree.map(mask, as_numbers))
    return jax.tree.map(lambda x, b: x.astype(jnp.bool_) if b else x, summed, bools)


def run_collective(
    communicate: Callable[[list[jax.Array]], Any],
    value: PyTree,
    packing: Packing | None = None,
    *,
    joins: bool = True,
) -> PyTree:
    """Applies `communicate` to the list of leaves, or to each of the packs that it is divided in.

    Args:
        communicate: What is done with the leaves of one collective. It keeps their shapes.
        value: Pytree of arrays; with one replica it is returned.
        packing: By default all leaves are in one pack.
        joins: Whether `communicate` may be given one flat array for several.
    """
    leaves, treedef = jax.tree.flatten(value)
    leaves = [jnp.asarray(x) for x in leaves]
    if num_replicas() == 1:
        # Nothing to say; and XLA refuses collectives over one partly manual device.
        return jax.tree.unflatten(treedef, leaves)
    if _eager_axis.get() is not None:
        communicate = _trace_first(communicate)
    dtypes = [x.dtype for x in leaves]
    widen = platform() == "cpu"
    sent = [x.astype(jnp.float32) if widen and is_16_bit_float(x.dtype) else x for x in leaves]
    if packing is not None:
        received = packing.apply(communicate, sent, joins and widen)
    else:
        received = communicate(sent) if sent else []
    return jax.tree.unflatten(
        treedef,
        [
            y.astype(dtype) if y.dtype == jnp.float32 and is_16_bit_float(dtype) else y
            for y, dtype in zip(received, dtypes, strict=True)
        ],
    )


def _trace_first(communicate: Callable[[list[jax.Array]], Any]) -> Callable[..., list[Any]]:
    """`communicate` as the collectives in it: JAX takes what is not traced for equal everywhere."""

    def evaluate(leaves: list[jax.Array]) -> list[Any]:
        traced = jax.make_jaxpr(lambda leaves: list(communicate(leaves)))(leaves)
        return core.jaxpr_as_fun(traced)(*leaves)

    return evaluate


def is_16_bit_float(dtype: Any) -> bool:
    """Whether values of `dtype` are floats of at most 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2


def mean_dtype(x: jax.Array) -> Any:
    """The dtype of a mean: the array's own, but JAX's float (float32 without x64) for integers."""
    return x.dtype if _is_inexact(x) else jnp.result_type(float)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def platform() -> str:
    """The platform traced for, which need not be this process's own: the mesh knows it."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _dim(x: jax.Array, axis: int, what: str) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{what}(axis={axis}): the value has shape {x.shape}, with {x.ndim} dim(s). Use an "
            "axis of the value; a scalar has none: add one with x[None]."
        )
    return axis % x.ndim
