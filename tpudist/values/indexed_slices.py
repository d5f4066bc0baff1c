"""IndexedSlices: some rows of an array, such as the gradient of a few rows of a table.

Replicas combine them without computing the whole array: each replica gets the rows of all.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tpudist.array_types import PyTree, Shape
from tpudist.reduce_op import ReduceOp
from tpudist.values import gathered_rows
from tpudist.xla import collectives
from tpudist.xla.traces import is_traced


@jax.tree_util.register_pytree_node_class
class IndexedSlices:
    """Rows `values[i]` of an array, at `indices[i]` of its dim 0. Rows with equal indices add up.

    Matches `tf.IndexedSlices`. It is a pytree node, so a replica function can return it.

    Attributes:
        values: `[num_slices, ...]`.
        indices: `[num_slices]`, integers.
        dense_shape: Shape of the array; None if it is unknown.
    """

    __slots__ = ("dense_shape", "indices", "values")

    # Not only arrays: JAX also rebuilds pytrees with shapes, specs and other leaves.
    def __init__(
        self, values: PyTree, indices: PyTree, dense_shape: ArrayLike | Shape | None = None
    ):
        self.values, self.indices = values, indices
        self.dense_shape = None if dense_shape is None else _parse_shape(dense_shape)

    def tree_flatten(self):
        """Returns values and indices as children, and the shape as structure."""
        return (self.values, self.indices), self.dense_shape

    @classmethod
    def tree_unflatten(cls, dense_shape, children):
        """Inverts `tree_flatten`."""
        values, indices = children
        return cls(values, indices, dense_shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self.values.dtype

    def __repr__(self) -> str:
        shape = "" if self.dense_shape is None else f", dense_shape={self.dense_shape}"
        return f"IndexedSlices(values={self.values!r}, indices={self.indices!r}{shape})"


def _parse_shape(dense_shape: Any) -> Shape:  # a sequence or an array of integers
    if is_traced(dense_shape):
        raise TypeError(
            f"IndexedSlices(dense_shape={dense_shape!r}): this array has no known values while the "
            "function is traced. Pass a tuple of ints: shapes are static."
        )
    return tuple(int(x) for x in dense_shape)


def is_slices(x: object) -> bool:
    """Returns whether `x` is an IndexedSlices."""
    return isinstance(x, IndexedSlices)


def has_slices(tree: PyTree) -> bool:
    """Returns whether a tree contains an IndexedSlices."""
    return any(is_slices(x) for x in jax.tree.leaves(tree, is_leaf=is_slices))


def all_reduce(
    op: ReduceOp, value: PyTree, dense: Callable[..., PyTree] = collectives.all_reduce
) -> PyTree:
    """Reduces a tree that may contain IndexedSlices over the replicas.

    The slices of all replicas are concatenated; for `MEAN` they are divided by the number of
    replicas.

    Args:
        op: The reduction.
        value: The tree.
        dense: Called with `op` and the other leaves of the tree; returns the reduced leaves.

    Raises:
        ValueError: If the tree contains slices and `op` is not `SUM` or `MEAN`.
    """
    if not has_slices(value):
        return dense(op, value)
    # Two calls for the whole tree, one for arrays and one for slices, because a call can combine
    # its arrays into few collectives. The iterators put the results back in the order of the
    # leaves.
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_slices)
    arrays = iter(dense(op, [x for x in leaves if not is_slices(x)]))
    slices = iter(_gather(op, [x for x in leaves if is_slices(x)]))
    return treedef.unflatten([next(slices) if is_slices(x) else next(arrays) for x in leaves])


def _gather(op: ReduceOp, slices: list[IndexedSlices]) -> list[IndexedSlices]:
    # Concatenation is a sum: rows with equal indices add up when slices are used. So a mean only
    # divides the values.
    n = divisor_of(op, collectives.num_replicas())
    pairs = [(jnp.asarray(x.values), jnp.asarray(x.indices)) for x in slices]
    gathered = gathered_rows.all_gather(pairs, 0)
    return [
        IndexedSlices(values if n == 1 else values / n, indices, x.dense_shape)
        for x, (values, indices) in zip(slices, gathered, strict=True)
    ]


def divisor_of(op: ReduceOp, num_replicas: int) -> int:
    """Returns the divisor of slices: the number of replicas for `MEAN`, 1 for `SUM`.

    Raises:
        ValueError: If `op` is another reduction.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"{op} of IndexedSlices is not supported: slices of several replicas can be combined "
            "only by SUM or MEAN. Convert them to a whole array first."
        )
    return num_replicas if op is ReduceOp.MEAN else 1


def refuse_slices(value: PyTree, function: str) -> None:
    """Rejects IndexedSlices for a function that concatenates values.

    Raises:
        NotImplementedError: If `value` contains IndexedSlices.
    """
    if has_slices(value):
        raise NotImplementedError(
            f"{function} does not support IndexedSlices. Combine them by SUM or MEAN, or "
            "concatenate their values and their indices separately."
        )
