"""Batches whose rows do not divide over the devices, without a program's seeing any padding.

Arrays that enter a program must divide over the devices, values inside it need not. So a batch is
padded on the host, placed split, and cut to its real rows as the first operation of the compiled
step, with a sharding constraint: XLA splits 60 rows over 8 devices as 8, ..., 8, 4 and masks what
is missing by itself. What follows is the program of one device, and nothing of it sees the padding.
"""

import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from keras import tree

from tpudist.keras.mesh_distribution import MeshDistribution
from tpudist.lowering import placement
from tpudist.values.per_replica import PerReplica
from tpudist.xla.traces import is_traced


@jax.tree_util.register_pytree_node_class
class UnevenRows:
    """An array `[rows, ...]` of a batch, padded on the devices.

    Attributes:
        padded: Equal parts of rows and padding, one after the other, split over the devices; or
            stacked, `[parts, rows of a part, ...]`.
        rows: How many rows of each part are real: its first ones.
        is_stacked: Whether the parts are stacked.
        sharding: How the real rows are split where they are cut out.
    """

    __slots__ = ("is_stacked", "padded", "rows", "sharding")

    def __init__(
        self, padded: Any, rows: tuple[int, ...], is_stacked: bool, sharding: NamedSharding
    ):
        """Wraps a padded array."""
        self.padded, self.rows, self.is_stacked = padded, rows, is_stacked
        self.sharding = sharding

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The padded array is the child; how many rows are real is part of a program."""
        return (self.padded,), (self.rows, self.is_stacked, self.sharding)

    @classmethod
    def tree_unflatten(cls, structure, children):
        """The inverse of `tree_flatten`."""
        return cls(children[0], *structure)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is real."""
        return (sum(self.rows), *self.padded.shape[1 + self.is_stacked :])

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.padded.ndim - self.is_stacked

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.padded.dtype

    def cut(self) -> jax.Array:
        """The real rows: split, in a program; whole on every device, outside of one."""
        if is_traced(self.padded):
            return jax.lax.with_sharding_constraint(self._join(self.padded), self.sharding)
        whole = NamedSharding(self.sharding.mesh, jax.sharding.PartitionSpec())
        return jax.jit(self._join, out_shardings=whole)(self.padded)

    def _join(self, padded: jax.Array) -> jax.Array:
        """The real rows of all parts. Those of one part are where they are: nothing is sent."""
        if self.is_stacked:
            padded = padded.reshape(-1, *padded.shape[2:])
        each = padded.shape[0] // len(self.rows)
        ranges: list[tuple[int, int]] = []
        for i, rows in enumerate(self.rows):
            start, stop = i * each, i * each + rows
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            elif rows:
                ranges.append((start, stop))
        pieces = [padded[start:stop] for start, stop in ranges] or [padded[:0]]
        return pieces[0] if len(pieces) == 1 else jax.numpy.concatenate(pieces)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The real rows on the host; for a model that Keras builds by calling it."""
        return np.asarray(self.cut(), dtype)


def place(value: Any, distribution: MeshDistribution) -> Any:
    """A leaf of a host batch on the devices: split over them, padded if need be.

    In several processes all have the whole batch, of which each places its own rows.
    """
    if value is None or isinstance(value, UnevenRows):
        return value
    if not isinstance(value, jax.Array):
        if not hasattr(value, "__array__"):  # a sparse one
            _warn_of_whole(value, distribution)
            return jax.device_put(value, distribution.whole)
        value = _canonical(np.asarray(value))
    if value.ndim == 0:
        return put(value, distribution.whole)
    num_rows = value.shape[0]
    sharding, parts = distribution.rows_sharding(num_rows)
    missing = -num_rows % parts
    if not missing:
        return put(value, sharding)
    padding = np.zeros((missing, *value.shape[1:]), value.dtype)
    padded = put(np.concatenate([np.asarray(value), padding]), sharding)
    return UnevenRows(padded, (num_rows,), False, sharding)


def _warn_of_whole(value: Any, distribution: MeshDistribution) -> None:
    if distribution.mesh.size > 1:
        warnings.warn(
            f"A batch for {distribution.strategy!r} holds a sparse {type(value).__name__}, whose "
            f"rows are not split: each of the {distribution.mesh.size} devices computes everything "
            "that depends on it, with the same results. To split it, pass a dense array.",
            stacklevel=4,
        )


def place_batch(batch: Any, distribution: MeshDistribution) -> Any:
    """A host batch on the devices."""
    return tree.map_structure(lambda x: place(x, distribution), batch)


def of_replicas(value: Any, distribution: MeshDistribution) -> Any:
    """A leaf of an element of a distributed dataset, or of its `element_spec`, as rows.

    Raises:
        TypeError: Its parts are no rows of a batch.
    """
    if not isinstance(value, PerReplica):
        return value  # of the only replica, or equal everywhere
    if value.rows is None or value.dim != 0 or value.other_rows:
        raise TypeError(
            f"An element of the distributed dataset has parts {list(value.shape)} on each replica "
            "that are not rows of a batch, but a Keras model trains on batches. Batch the dataset "
            "before you distribute it."
        )
    sharding, _ = distribution.rows_sharding(sum(value.rows))
    return UnevenRows(value.array, value.rows, True, sharding)


def cut_batch(batch: Any) -> Any:
    """The real rows of a batch."""
    return tree.map_structure(lambda x: x.cut() if isinstance(x, UnevenRows) else x, batch)


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """An array that all processes have, on the devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    host = np.asarray(value)
    return placement.make_array(host.shape, sharding, host.__getitem__)


def _canonical(value: np.ndarray) -> np.ndarray:
    """With the dtype that JAX gives it: padding would double what is to be halved anyway."""
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    return value if dtype == value.dtype else value.astype(dtype)
