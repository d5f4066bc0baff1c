"""IndexedSlices: some rows of an array, such as a gradient that touches a few rows of a table.

Replicas combine them without making the whole array: all of them get all rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.array_types import PyTree
from tpudist.reduce_op import ReduceOp
from tpudist.values import gathered_rows
from tpudist.xla import collectives
from tpudist.xla.traces import is_traced


@jax.tree_util.register_pytree_node_class
class IndexedSlices:
    """Rows `values[i]` of an array, each at `indices[i]` of its dim 0. Rows of one index add up.

    As `tf.IndexedSlices`. A pytree node, so it can be returned from a replica function.

    Attributes:
        values: `[num_slices, ...]`.
        indices: `[num_slices]`, integers.
        dense_shape: Shape of the array, or None if it is not known.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None):
        """See the class."""
        self.values, self.indices = values, indices
        self.dense_shape = None if dense_shape is None else _parse_shape(dense_shape)

    def tree_flatten(self):
        """Values and indices are children, the shape is structure."""
        return (self.values, self.indices), self.dense_shape

    @classmethod
    def tree_unflatten(cls, dense_shape, children):
        """The inverse of `tree_flatten`."""
        values, indices = children
        return cls(values, indices, dense_shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self.values.dtype

    def __repr__(self) -> str:
        shape = "" if self.dense_shape is None else f", dense_shape={self.dense_shape}"
        return f"IndexedSlices(values={self.values!r}, indices={self.indices!r}{shape})"


def _parse_shape(dense_shape: Any) -> tuple[int, ...]:
    if is_traced(dense_shape):
        raise TypeError(
            f"IndexedSlices(dense_shape={dense_shape!r}): this array has no known values while the "
            "function is traced. Pass a tuple of ints: shapes are static."
        )
    return tuple(int(x) for x in dense_shape)


def is_slices(x: Any) -> bool:
    """Whether `x` is an IndexedSlices, to be taken as a whole."""
    return isinstance(x, IndexedSlices)


def has_slices(tree: PyTree) -> bool:
    """Whether there is an IndexedSlices in a tree."""
    return any(is_slices(x) for x in jax.tree.leaves(tree, is_leaf=is_slices))


def all_reduce(
    op: ReduceOp, value: PyTree, dense: Callable[..., PyTree] = collectives.all_reduce
) -> PyTree:
    """As `dense` does it, of a tree that may hold IndexedSlices.

    Those of all replicas are put behind each other, for `MEAN` divided by their number.

    Raises:
        ValueError: Slices are to be combined by another op than `SUM` or `MEAN`.
    """
    if not has_slices(value):
        return dense(op, value)
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_slices)
    whole = iter(dense(op, [x for x in leaves if not is_slices(x)]))
    sparse = iter(_gather(op, [x for x in leaves if is_slices(x)]))
    return treedef.unflatten([next(sparse) if is_slices(x) else next(whole) for x in leaves])


def _gather(op: ReduceOp, slices: list[IndexedSlices]) -> list[IndexedSlices]:
    n = check_op(op, collectives.num_replicas())
    pairs = [(jnp.asarray(x.values), jnp.asarray(x.indices)) for x in slices]
    gathered = gathered_rows.all_gather(pairs, 0)
    return [
        IndexedSlices(values if n == 1 else values / n, indices, x.dense_shape)
        for x, (values, indices) in zip(slices, gathered, strict=True)
    ]


def check_op(op: ReduceOp, num_replicas: int) -> int:
    """By what the values of all replicas are divided: their number for a `MEAN`, else 1.

    Raises:
        ValueError: Another op.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"{op} of IndexedSlices is not supported: slices of several replicas can be combined "
            "only by SUM or MEAN. Convert them to a whole array first."
        )
    return num_replicas if op is ReduceOp.MEAN else 1


def check_dense(value: PyTree, what: str) -> None:
    """Refuses IndexedSlices where values are concatenated.

    Raises:
        NotImplementedError: There is one in `value`.
    """
    if has_slices(value):
        raise NotImplementedError(
            f"{what} does not support IndexedSlices. Combine them by SUM or MEAN, or concatenate "
            "their values and their indices separately."
        )
