"""One global batch in host memory: checked once, then read in parts by whoever needs rows of it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """Rows of a pytree of arrays that make one global batch.

    Attributes:
        leaves: Arrays `[rows, ...]` that hold the batch, perhaps among others' rows.
        treedef: Structure of the batch.
        num_rows: Number of rows of the batch.
        start: Where its rows begin, in `order` or else in the arrays.
        order: Integers `[rows]`, the order in which the rows of the arrays are read, or None.
    """

    leaves: list[np.ndarray]
    treedef: jax.tree_util.PyTreeDef
    num_rows: int
    start: int = 0
    order: np.ndarray | None = None

    def take(self, positions: np.ndarray, *, copy: bool) -> list[np.ndarray]:
        """The rows at `positions` of this batch, for each leaf, in the dtypes that JAX will use.

        Args:
            positions: Integers of any shape, from 0 to `num_rows` - 1.
            copy: Whether what is returned must not share memory with the leaves.

        Returns:
            Arrays `[*positions.shape, ...]`; if `copy` is false, views where rows are in sequence.
        """
        rows = None if self._in_sequence(positions) else self.start + positions
        if self.order is not None:
            rows = self.order[self.start + positions]
        first = self.start + int(positions.flat[0])
        taken = []
        for leaf in self.leaves:
            if rows is None:
                part = leaf[first : first + positions.size]
                part = part.reshape(positions.shape + leaf.shape[1:])
            else:
                part = np.take(leaf, rows, axis=0)
            taken.append(in_jax_dtype(part, copy=copy and rows is None))
        return taken

    def _in_sequence(self, positions: np.ndarray) -> bool:
        return self.order is None and bool(np.all(np.diff(positions.reshape(-1)) == 1))


def from_element(element: PyTree, index: int) -> HostBatch:
    """The batch that `element`, number `index` of a user's dataset, is.

    Raises:
        TypeError: A leaf is not an array of numbers.
        ValueError: A leaf has no rows, or the leaves have not the same number of them.
    """
    what = f"Batch {index} of the dataset"
    leaves, names, treedef = as_arrays(element, what)
    return HostBatch(leaves, treedef, common_rows(leaves, names, what))


def as_arrays(
    element: PyTree, what: str
) -> tuple[list[np.ndarray], list[str], jax.tree_util.PyTreeDef]:
    """The leaves of an element as arrays, with their names, and its structure; see `as_array`."""
    named, treedef = jax.tree_util.tree_flatten_with_path(element, is_leaf=_is_list_of_numbers)
    leaves = [as_array(leaf, f"{what}{_name(path)}") for path, leaf in named]
    return leaves, [_name(path) for path, _ in named], treedef


def as_array(value: Any, what: str) -> np.ndarray:
    """`value` as an array of numbers; `what` names it in errors.

    Raises:
        ValueError: It is ragged.
        TypeError: Its elements are not numbers.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:  # NumPy's own message names neither the leaf nor a remedy
        raise ValueError(
            f"{what} is not an array: {error}. Every row must have the same shape; pad the rows to "
            f"one."
        ) from error
    if _jax_dtype(array.dtype) is None:
        raise TypeError(
            f"{what} has dtype {array.dtype}, but devices hold numbers and booleans only. Convert "
            f"it, for example text to token ids, or leave it out of the dataset."
        )
    return array


def in_jax_dtype(array: np.ndarray, *, copy: bool) -> np.ndarray:
    """`array` in the dtype in which JAX holds it; not the same memory, if `copy`."""
    return array.astype(_jax_dtype(array.dtype), copy=copy)


def common_rows(leaves: list[np.ndarray], names: list[str], what: str) -> int:
    """The number of rows that all leaves have.

    Raises:
        ValueError: There are no leaves, one has no dim 0, or the numbers differ or are 0.
    """
    if not leaves:
        raise ValueError(f"{what} holds no arrays. Give at least one, with examples along dim 0.")
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.ndim == 0:
            raise ValueError(
                f"{what}{name} is a scalar, but examples are counted along dim 0. Batch the "
                f"dataset by the global batch size before it is distributed."
            )
    if len({len(leaf) for leaf in leaves}) > 1:
        listed = ", ".join(
            f"{name or 'array'} {len(leaf)}" for name, leaf in zip(names, leaves, strict=True)
        )
        raise ValueError(
            f"{what} has arrays of different numbers of rows: {listed}. All arrays count the same "
            f"examples along dim 0."
        )
    if len(leaves[0]) == 0:
        raise ValueError(f"{what} has no rows. Leave out batches without examples.")
    return len(leaves[0])


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path)


def _is_list_of_numbers(value: Any) -> bool:
    """Whether a list is data; lists of arrays are structure to JAX, and so here."""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(item, int | float | complex | np.generic) or _is_list_of_numbers(item)
        for item in value
    )


def _jax_dtype(dtype: np.dtype) -> np.dtype | None:
    """The dtype in which JAX holds `dtype` (float32 for float64), None if it cannot."""
    if not jnp.issubdtype(dtype, np.bool_) and not jnp.issubdtype(dtype, np.number):
        return None
    return jax.dtypes.canonicalize_dtype(dtype)
