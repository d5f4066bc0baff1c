"""A global batch in host memory, and the checks and conversions of its arrays."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tpudist.array_types import PyTree
from tpudist.input.permutation import Order
from tpudist.input.transfer import reused_memory
from tpudist.values.per_replica import PerReplica
from tpudist.xla import integers, random_keys, traces, tree_depth
from tpudist.xla.settings import Setting


class HostBatch(NamedTuple):
    """One global batch: rows of a pytree of arrays, which may contain other rows too.

    Attributes:
        leaves: Arrays `[rows, ...]`.
        treedef: Structure of the batch.
        num_rows: Number of rows of the batch.
        start: Position of the first row of the batch in `order`, or in the arrays without one.
        order: The order in which the rows of the arrays are read, or None.
    """

    leaves: list[np.ndarray]
    treedef: jax.tree_util.PyTreeDef
    num_rows: int
    start: int = 0
    order: Order | None = None

    def take(self, positions: np.ndarray, *, copy: bool) -> list[np.ndarray]:
        """Returns the rows at `positions` for each leaf, in the dtypes that JAX will use.

        Args:
            positions: Integers of any shape, from 0 to `num_rows` - 1.
            copy: Whether the result must not share memory with the leaves.

        Returns:
            Arrays `[*positions.shape, ...]`; views of rows in sequence, if `copy` is False.
        """
        # Numbers of the rows in the arrays; None if they are one slice of the arrays.
        first, rows = self.start + int(positions.flat[0]), None
        in_sequence = _are_in_sequence(positions)
        if in_sequence and self.order is not None:
            rows = self.order[first : first + positions.size].reshape(positions.shape)
        elif not in_sequence:
            rows = self.start + positions
            rows = rows if self.order is None else self.order[rows]
        taken = []
        for i, leaf in enumerate(self.leaves):
            if rows is None:
                part = leaf[first : first + positions.size]
                part = part.reshape(positions.shape + leaf.shape[1:])
            else:
                part = gather(leaf, rows)
            # The name is only computed for an error.
            label = functools.partial(name_of_leaf, self.treedef, i)
            taken.append(to_jax_dtype(part, label, copy=copy and rows is None))
        return taken


# Results for read-only positions, which the feeds cache and pass for every batch. By id, because
# comparing the arrays costs as much as the question; the array in the value keeps its id in use.
# Without a lock for the threads of several passes: a lost entry is only computed again.
_in_sequence: dict[int, tuple[np.ndarray, bool]] = {}
_MAX_IN_SEQUENCE = 64


def _are_in_sequence(positions: np.ndarray) -> bool:
    known, result = _in_sequence.get(id(positions), (None, False))
    if known is positions:
        return result
    flat = positions.reshape(-1)
    result = bool((flat[1:] - flat[:-1] == 1).all())
    if not positions.flags.writeable:
        if len(_in_sequence) >= _MAX_IN_SEQUENCE:
            _in_sequence.clear()
        _in_sequence[id(positions)] = positions, result
    return result


def gather(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the rows of an array, `[*rows.shape, ...]`; `rows` must be in range."""
    if not array.flags.carray:  # `np.take` would copy the whole array first
        return array[rows]
    gathered = reused_memory.empty(rows.shape + array.shape[1:], array.dtype)
    # With mode "raise", `np.take` would gather into a buffer of its own, and then copy.
    return np.take(array, rows, axis=0, out=gathered, mode="clip")


def from_element(element: PyTree, index: int) -> HostBatch:
    """Returns element `index` of a user's dataset as a batch.

    Raises:
        TypeError: If a leaf is not an array of numbers.
        ValueError: If a leaf has no rows, or the leaves have different numbers of rows.
    """
    label = f"Batch {index} of the dataset"
    leaves, names, treedef = as_arrays(element, label)
    return HostBatch(leaves, treedef, common_rows(leaves, names, label))


def as_arrays(
    element: PyTree, label: str
) -> tuple[list[np.ndarray], list[str], jax.tree_util.PyTreeDef]:
    """Returns the leaves of an element as arrays, their names, and its structure.

    Raises the errors of `flatten` and `as_array`, which begin with `label`.
    """
    leaves, names, treedef = flatten(element, label)
    arrays = [as_array(x, label + name) for x, name in zip(leaves, names, strict=True)]
    return arrays, names, treedef


def flatten(element: PyTree, label: str) -> tuple[list[Any], list[str], jax.tree_util.PyTreeDef]:
    """Returns the leaves of an element unchanged, their names, and its structure.

    Raises:
        ValueError: If `element` is nested too deep, or a leaf is traced.
        TypeError: If a leaf is a `PerReplica`.
    """
    tree_depth.check_depth(element, label)
    named, treedef = jax.tree_util.tree_flatten_with_path(element, is_leaf=_is_leaf)
    leaves = [leaf for _, leaf in named]
    names = [jax.tree_util.keystr(path) for path, _ in named]
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, PerReplica):
            raise TypeError(
                f"{label}{name} is a PerReplica, so the replicas already have it. Pass it to "
                "strategy.run as it is, or pass the arrays [rows, ...] that it was made from."
            )
        if traces.is_traced(leaf):
            raise ValueError(
                f"{label}{name} belongs to a program that jax.jit or tpudist.function is tracing, "
                "and has no numbers yet. Distribute batches outside of it, and pass the result as "
                "an argument."
            )
    return leaves, names, treedef


def as_array(value: ArrayLike, label: str) -> np.ndarray:
    """Returns `value` as an array of numbers. `label` is its name in errors.

    Raises:
        ValueError: If it is ragged.
        TypeError: If its elements are not numbers, or it is a masked array, or another
            object of the buffer protocol.
    """
    integers.refuse_masks_and_buffers(value, label)
    if isinstance(value, jax.Array) and random_keys.is_key(value):
        raise TypeError(
            f"{label} has random keys, {value.dtype}{list(value.shape)}, but batches are read in "
            "host memory, which holds only numbers and booleans. Pass their numbers, "
            "jax.random.key_data(keys), and make keys from them in the step: "
            f"jax.random.wrap_key_data(data, impl={str(jax.random.key_impl(value))!r})."
        )
    try:
        array = np.asarray(value)
    except ValueError as error:  # NumPy's own message names neither the leaf nor a remedy
        raise ValueError(
            f"{label} is not an array: {error}. Every row must have the same shape; pad the rows "
            f"to one."
        ) from error
    if jax_dtype(array.dtype) is None:
        raise TypeError(
            f"{label} has dtype {array.dtype}, but devices hold only numbers and booleans. Convert "
            "it, for example text to token ids, or remove it from the dataset."
        )
    return array


def name_of_leaf(treedef: jax.tree_util.PyTreeDef, number: int) -> str:
    """Returns the name of leaf `number` of a batch, for errors."""
    numbered = treedef.unflatten(range(treedef.num_leaves))
    path, _ = jax.tree_util.tree_flatten_with_path(numbered)[0][number]
    return f"A batch of the dataset{' at ' * bool(path)}{jax.tree_util.keystr(path)}"


def to_jax_dtype(array: np.ndarray, label: str | Callable[[], str], *, copy: bool) -> np.ndarray:
    """Returns `array` in the dtype that JAX uses for it; in other memory, if `copy`.

    Raises:
        ValueError: If an integer does not fit that dtype. `label` is (or returns) the array's name.
    """
    integers.check_fit(array, label)
    dtype = jax_dtype(array.dtype)
    assert dtype is not None, array.dtype
    if dtype != array.dtype:
        cast = reused_memory.empty(array.shape, dtype)
        np.copyto(cast, array, casting="unsafe")
        return cast
    return reused_memory.copy_of(array) if copy else array


def common_rows(
    leaves: list[np.ndarray], names: list[str], label: str, *, may_be_empty: bool = False
) -> int:
    """Returns the number of rows of all leaves.

    Raises:
        ValueError: If there are no leaves, a leaf has no dim 0, the numbers differ, or they are 0
            and not `may_be_empty`.
    """
    if not leaves:
        raise ValueError(f"{label} holds no arrays. Pass at least one, with examples along dim 0.")
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.ndim == 0:
            raise ValueError(
                f"{label}{name} is a scalar, but examples are counted along dim 0. Batch the "
                f"dataset by the global batch size before it is distributed."
            )
    if len({len(leaf) for leaf in leaves}) > 1:
        listed = ", ".join(
            f"{name or 'array'} {len(leaf)}" for name, leaf in zip(names, leaves, strict=True)
        )
        raise ValueError(
            f"{label} has arrays of different numbers of rows: {listed}. All arrays must count the "
            "same examples along dim 0."
        )
    if len(leaves[0]) == 0 and not may_be_empty:
        raise ValueError(f"{label} has no rows. Skip batches without examples.")
    return len(leaves[0])


def _is_leaf(value: object) -> bool:
    return isinstance(value, PerReplica) or _is_list_of_numbers(value)


def _is_list_of_numbers(value: object) -> bool:
    """Whether a list is one array. A list of arrays is structure, as in JAX."""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(item, int | float | complex | np.generic) or _is_list_of_numbers(item)
        for item in value
    )


def jax_dtype(dtype: np.dtype) -> np.dtype | None:
    """Returns the dtype that JAX uses for `dtype` (float32 for float64); None if it has none."""
    return _dtype_on_devices(dtype, Setting.ENABLE_X64.read())


@functools.lru_cache(maxsize=64)
def _dtype_on_devices(dtype: np.dtype, x64: bool) -> np.dtype | None:
    del x64  # part of the key of the cache; `canonicalize_dtype` reads the setting itself
    if not jnp.issubdtype(dtype, np.bool_) and not jnp.issubdtype(dtype, np.number):
        return None
    # In this machine's byte order: files such as MNIST's have the other one.
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))
