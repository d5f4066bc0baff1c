"""The loss of the whole batch, whose gradient is equal on all replicas without a reduction."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.reduce_op import ReduceOp
from tpudist.state import nnx_contents
from tpudist.xla import collectives
from tpudist.xla.adjoint_pair import adjoint_call
from tpudist.xla.array_attributes import has_dtype


def loss_of_all_rows(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Returns the loss function of the whole batch.

    Its value and its gradient count the rows of all replicas. Both are equal on every replica, so
    line searches (`optax.lbfgs`), second-order methods and `jax.grad` need no further reduction:

        def step(weights, batch):
            def loss(weights):
                return tpudist.compute_average_loss(errors(weights, batch))

            gradients = jax.grad(tpudist.loss_of_all_rows(loss))(weights)

    Args:
        loss_fn: Called with the same arguments; returns the share of one replica, a scalar: a sum
            over its rows, divided by the number of rows on all replicas (`compute_average_loss`).
            Its first argument, a pytree or an NNX object, must be equal on all replicas. Gradients
            for other arguments, and for values that it captures, count only this replica's rows.
        has_aux: Whether `loss_fn` returns a pair of the loss and auxiliary values, which stay those
            of the replica.

    Raises:
        RuntimeError: If the function is called in cross-replica context.
        ValueError: If the loss is not a scalar.
    """

    @functools.wraps(loss_fn)
    def of_all_rows(parameters: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        replica = context.get_replica_context()
        if replica is None:
            raise RuntimeError(
                "A loss of loss_of_all_rows was called in cross-replica context. Call it in the "
                "function that strategy.run runs."
            )
        is_alone = replica.num_replicas_in_sync == 1  # also outside of all strategies
        if is_alone:
            result = loss_fn(parameters, *args, **kwargs)
        else:
            with _share_tree(parameters) as shared:
                result = loss_fn(shared, *args, **kwargs)
        loss, *aux = result if has_aux else (result,)
        if jnp.ndim(loss):
            raise ValueError(
                f"loss_of_all_rows: the loss has shape {list(jnp.shape(loss))}, and must be a "
                f"scalar. Use tpudist.compute_average_loss(per_example_loss)."
            )
        total = loss if is_alone else adjoint_call(_sum, _same, jnp.asarray(loss))
        return (total, *aux) if has_aux else total

    return of_all_rows


def _share(x: PyTree) -> PyTree:
    # Only inexact arrays, of any library, have derivatives. Python numbers stay static.
    is_inexact = has_dtype(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    return adjoint_call(_same, _sum, x) if is_inexact else x


@contextlib.contextmanager
def _share_tree(tree: PyTree) -> Iterator[PyTree]:
    """Yields the tree with shared arrays; Params of NNX objects are shared while the block runs."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_object)
    objects = [x for x in leaves if _is_object(x)]
    parameters = [x for _, x in nnx.iter_graph(objects) if isinstance(x, nnx.Param)]
    before = [x.get_value() for x in parameters]
    for x, value in zip(parameters, before, strict=True):
        x.set_value(jax.tree.map(_share, value))
    try:
        yield structure.unflatten([x if _is_object(x) else _share(x) for x in leaves])
    finally:
        for x, value in zip(parameters, before, strict=True):
            x.set_value(value)


def _is_object(x: object) -> bool:
    return isinstance(x, nnx_contents.OBJECT_TYPES)


# Parameters pass through `_same`, whose transpose `_sum` adds the gradients of all replicas. The
# loss passes through `_sum`, whose transpose is `_same`, because its cotangent is equal on all
# replicas already. So derivatives of any order are equal on all replicas.


def _same(x: jax.Array) -> jax.Array:
    """Returns a value that is equal on all replicas."""
    return x


def _sum(x: jax.Array) -> jax.Array:
    """Returns the sum of the values of all replicas."""
    return collectives.all_reduce(ReduceOp.SUM, x)
