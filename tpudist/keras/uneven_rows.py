"""Splits batches whose rows do not divide over the devices; no program sees the padding.

Arrays that enter a program must divide over the devices; values inside it need not. So a batch is
padded on the host and placed split. The first operation of the compiled step cuts it to its real
rows, with a sharding constraint: XLA splits 60 rows over 8 devices as 8, ..., 8, 4, and masks the
missing rows itself. The rest is the program of one device.
"""

import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from keras import tree

from tpudist.keras.keras_internals import Batch
from tpudist.keras.mesh_distribution import MeshDistribution
from tpudist.keras.process_batches import is_dense
from tpudist.lowering import placement
from tpudist.values.per_replica import PerReplica
from tpudist.xla.traces import is_traced


@jax.tree_util.register_pytree_node_class
class UnevenRows:
    """An array `[rows, ...]` of a batch, padded on the devices.

    Attributes:
        padded: Parts of equal size, each with real rows and then padding, split over the devices.
            The parts are concatenated, or stacked as `[parts, rows of a part, ...]`.
        rows: Number of real rows of each part.
        is_stacked: Whether the parts are stacked.
        sharding: Sharding of the real rows after the cut.
    """

    __slots__ = ("is_stacked", "padded", "rows", "sharding")

    def __init__(
        self, padded: Any, rows: tuple[int, ...], is_stacked: bool, sharding: NamedSharding
    ):
        self.padded, self.rows, self.is_stacked = padded, rows, is_stacked
        self.sharding = sharding

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the padded array as the child; the numbers of rows are static."""
        return (self.padded,), (self.rows, self.is_stacked, self.sharding)

    @classmethod
    def tree_unflatten(cls, structure, children):
        """Returns an object from the results of `tree_flatten`."""
        return cls(children[0], *structure)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the real rows."""
        num_leading_dims = 2 if self.is_stacked else 1
        return (sum(self.rows), *self.padded.shape[num_leading_dims:])

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.padded.ndim - self.is_stacked

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return self.padded.dtype

    def cut(self) -> jax.Array:
        """Returns the real rows: split in a program; whole on every device outside."""
        if is_traced(self.padded):
            return jax.lax.with_sharding_constraint(self._join(self.padded), self.sharding)
        whole = NamedSharding(self.sharding.mesh, jax.sharding.PartitionSpec())
        return jax.jit(self._join, out_shardings=whole)(self.padded)

    def _join(self, padded: jax.Array) -> jax.Array:
        # Adjacent ranges of rows are merged. So if there is only one part, or all parts are full,
        # this is one slice, for which devices send nothing.
        if self.is_stacked:
            padded = padded.reshape(-1, *padded.shape[2:])
        each = padded.shape[0] // len(self.rows)  # rows of a part, with its padding
        ranges: list[tuple[int, int]] = []
        for i, rows in enumerate(self.rows):
            start, stop = i * each, i * each + rows
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            elif rows:
                ranges.append((start, stop))
        pieces = [padded[start:stop] for start, stop in ranges] or [padded[:0]]
        return pieces[0] if len(pieces) == 1 else jax.numpy.concatenate(pieces)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Returns the real rows on the host, for a model that Keras builds by calling it."""
        return np.asarray(self.cut(), dtype)


def place(value: Any, distribution: MeshDistribution) -> Any:
    """Places a leaf of a host batch on the devices, split over them and padded if necessary.

    In several processes, each process has the whole batch and places its own rows.
    """
    if value is None or isinstance(value, UnevenRows):
        return value
    if not isinstance(value, jax.Array):
        if not is_dense(value):
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


def describe_placed(
    value: jax.ShapeDtypeStruct | None, distribution: MeshDistribution
) -> "jax.ShapeDtypeStruct | UnevenRows | None":
    """Returns the shape and placement of a leaf that `place` would place."""
    if value is None:
        return None
    if not value.shape:
        return jax.ShapeDtypeStruct((), value.dtype, sharding=distribution.whole)
    num_rows = value.shape[0]
    sharding, parts = distribution.rows_sharding(num_rows)
    shape = (num_rows + -num_rows % parts, *value.shape[1:])
    padded = jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding)
    return padded if shape == value.shape else UnevenRows(padded, (num_rows,), False, sharding)


def _warn_of_whole(value: object, distribution: MeshDistribution) -> None:
    if distribution.mesh.size > 1:
        warnings.warn(
            f"A batch for {distribution.strategy!r} holds a sparse {type(value).__name__}, whose "
            f"rows are not split: each of the {distribution.mesh.size} devices computes everything "
            "that depends on it, with the same results. To split it, pass a dense array.",
            stacklevel=4,
        )


def place_batch(batch: Batch, distribution: MeshDistribution) -> Batch:
    """Places a host batch on the devices."""
    return tree.map_structure(lambda x: place(x, distribution), batch)


def of_replicas(value: Any, distribution: MeshDistribution) -> Any:
    """Converts a leaf of an element of a distributed dataset, or of its `element_spec`, to rows.

    Raises:
        TypeError: If its parts are not rows of a batch.
    """
    if not isinstance(value, PerReplica):
        return value  # there is one replica, or the value is equal everywhere
    if value.rows is None or value.dim != 0 or value.other_rows:
        raise TypeError(
            f"An element of the distributed dataset has parts {list(value.shape)} on each replica "
            "that are not rows of a batch, but a Keras model trains on batches. Batch the dataset "
            "before you distribute it."
        )
    sharding, _ = distribution.rows_sharding(sum(value.rows))
    return UnevenRows(value.array, value.rows, True, sharding)


def cut_batch(batch: Batch) -> Batch:
    """Returns a batch with only its real rows."""
    return tree.map_structure(lambda x: x.cut() if isinstance(x, UnevenRows) else x, batch)


def put(value: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Places an array that all processes have on the devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    host = np.asarray(value)
    return placement.make_array(host.shape, sharding, host.__getitem__)


def _canonical(value: np.ndarray) -> np.ndarray:
    # Convert before padding: JAX would halve the size of 64-bit numbers later anyway.
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    return value if dtype == value.dtype else value.astype(dtype)
