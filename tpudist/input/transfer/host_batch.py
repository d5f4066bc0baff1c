"""One global batch in host memory: checked once, then read in parts by whoever needs rows of it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.array_types import PyTree
from tpudist.input.transfer import reused_memory
from tpudist.values.per_replica import PerReplica
from tpudist.xla import integers, random_keys, traces, tree_depth
from tpudist.xla.settings import Setting


class HostBatch(NamedTuple):
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
        first, where = self.start + int(positions.flat[0]), None
        in_sequence = _are_in_sequence(positions)
        if in_sequence and self.order is not None:
            where = self.order[first : first + positions.size].reshape(positions.shape)
        elif not in_sequence:
            where = self.start + positions
            where = where if self.order is None else self.order[where]
        taken = []
        for i, leaf in enumerate(self.leaves):
            if where is None:
                part = leaf[first : first + positions.size]
                part = part.reshape(positions.shape + leaf.shape[1:])
            else:
                part = gather(leaf, where)
            what = functools.partial(name_of_leaf, self.treedef, i)
            taken.append(to_jax_dtype(part, what, copy=copy and where is None))
        return taken


# Of positions that nobody can write to, so that they are asked for again and again.
_in_sequence: dict[int, tuple[np.ndarray, bool]] = {}


def _are_in_sequence(positions: np.ndarray) -> bool:
    # Found by id, and kept with the array: as long as it is here, no other one has its id.
    known, found = _in_sequence.get(id(positions), (None, False))
    if known is positions:
        return found
    flat = positions.reshape(-1)
    found = bool((flat[1:] - flat[:-1] == 1).all())
    if not positions.flags.writeable:
        if len(_in_sequence) >= 64:
            _in_sequence.clear()
        _in_sequence[id(positions)] = positions, found
    return found


def gather(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The rows of an array `[*rows.shape, ...]`; `rows` are known to be there."""
    if not array.flags.carray:  # np.take would copy all of it first
        return array[rows]
    gathered = reused_memory.empty(rows.shape + array.shape[1:], array.dtype)
    # Any mode but "raise", which gathers into memory of its own first.
    return np.take(array, rows, axis=0, out=gathered, mode="clip")


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
    leaves, names, treedef = flatten(element, what)
    arrays = [as_array(x, what + name) for x, name in zip(leaves, names, strict=True)]
    return arrays, names, treedef


def flatten(element: PyTree, what: str) -> tuple[list[Any], list[str], jax.tree_util.PyTreeDef]:
    """Returns the leaves of an element as they are, their names, and the structure.

    Raises:
        ValueError: If `element` is nested too deep, or a leaf is traced.
        TypeError: If a leaf is a `PerReplica`.
    """
    tree_depth.check_depth(element, what)
    named, treedef = jax.tree_util.tree_flatten_with_path(element, is_leaf=_is_leaf)
    leaves, names = [leaf for _, leaf in named], [_name(path) for path, _ in named]
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, PerReplica):
            raise TypeError(
                f"{what}{name} is a PerReplica, so the replicas already have it. Pass it to "
                "strategy.run as it is, or pass the arrays [rows, ...] that it was made from."
            )
        if traces.is_traced(leaf):
            raise ValueError(
                f"{what}{name} belongs to a program that jax.jit or tpudist.function is tracing, "
                "and has no numbers yet. Distribute batches outside of it, and pass the result as "
                "an argument."
            )
    return leaves, names, treedef


def as_array(value: Any, what: str) -> np.ndarray:
    """`value` as an array of numbers; `what` names it in errors.

    Raises:
        ValueError: It is ragged.
        TypeError: Its elements are not numbers, it is masked, or a buffer.
    """
    integers.refuse_masks_and_buffers(value, what)
    if random_keys.is_key(value):
        raise TypeError(
            f"{what} has random keys, {value.dtype}{list(value.shape)}, but batches are read in "
            "host memory, which holds only numbers and booleans. Pass their numbers, "
            "jax.random.key_data(keys), and make keys from them in the step: "
            f"jax.random.wrap_key_data(data, impl={str(jax.random.key_impl(value))!r})."
        )
    try:
        array = np.asarray(value)
    except ValueError as error:  # NumPy's own message names neither the leaf nor a remedy
        raise ValueError(
            f"{what} is not an array: {error}. Every row must have the same shape; pad the rows to "
            f"one."
        ) from error
    if jax_dtype(array.dtype) is None:
        raise TypeError(
            f"{what} has dtype {array.dtype}, but devices hold only numbers and booleans. Convert "
            "it, for example text to token ids, or remove it from the dataset."
        )
    return array


def name_of_leaf(treedef: jax.tree_util.PyTreeDef, number: int, what: str = "A batch") -> str:
    """What leaf `number` of an element of a dataset is called in errors."""
    numbered = treedef.unflatten(range(treedef.num_leaves))
    path, _ = jax.tree_util.tree_flatten_with_path(numbered)[0][number]
    return f"{what} of the dataset{' at ' * bool(path)}{_name(path)}"


def to_jax_dtype(array: np.ndarray, what: str | Callable[[], str], *, copy: bool) -> np.ndarray:
    """`array` in the dtype in which JAX holds it; not the same memory, if `copy`.

    Raises:
        ValueError: An integer of it does not fit that dtype; `what` names the array.
    """
    integers.check_fit(array, what)
    dtype = jax_dtype(array.dtype)
    assert dtype is not None, array.dtype
    if dtype != array.dtype:
        cast = reused_memory.empty(array.shape, dtype)
        np.copyto(cast, array, casting="unsafe")
        return cast
    return reused_memory.copy_of(array) if copy else array


def common_rows(
    leaves: list[np.ndarray], names: list[str], what: str, *, may_be_empty: bool = False
) -> int:
    """The number of rows that all leaves have.

    Raises:
        ValueError: There are no leaves, one has no dim 0, or the numbers differ, or are 0 and may
            not be.
    """
    if not leaves:
        raise ValueError(f"{what} holds no arrays. Pass at least one, with examples along dim 0.")
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
            f"{what} has arrays of different numbers of rows: {listed}. All arrays must count the "
            "same examples along dim 0."
        )
    if len(leaves[0]) == 0 and not may_be_empty:
        raise ValueError(f"{what} has no rows. Skip batches without examples.")
    return len(leaves[0])


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, PerReplica) or _is_list_of_numbers(value)


def _is_list_of_numbers(value: Any) -> bool:
    """Whether a list is data; lists of arrays are structure to JAX, and so here."""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(item, int | float | complex | np.generic) or _is_list_of_numbers(item)
        for item in value
    )


def jax_dtype(dtype: np.dtype) -> np.dtype | None:
    """The dtype in which JAX holds `dtype` (float32 for float64), None if it cannot."""
    return _dtype_on_devices(dtype, Setting.ENABLE_X64.read())


@functools.lru_cache(maxsize=64)
def _dtype_on_devices(dtype: np.dtype, x64: bool) -> np.dtype | None:
    del x64  # which `canonicalize_dtype` reads for itself
    if not jnp.issubdtype(dtype, np.bool_) and not jnp.issubdtype(dtype, np.number):
        return None
    # In the order of bytes of this machine: files such as MNIST's have the other one.
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))
