"""Batches whose rows do not divide over the devices, without a program's seeing any padding.

Arrays that enter a program must divide over the devices, values inside it need not. So a batch is
padded on the host, placed split, and cut to its real rows as the first operation of the compiled
step, with a sharding constraint: XLA splits 60 rows over 8 devices as 8, ..., 8, 4 and masks what
is missing by itself. What follows is the program of one device, and nothing of it sees the padding.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from keras import tree

from tpudist.keras.mesh_distribution import MeshDistribution
from tpudist.xla.traces import is_traced


@jax.tree_util.register_pytree_node_class
class UnevenRows:
    """An array `[rows, ...]` of a batch, padded on the devices.

    Attributes:
        padded: `[rows and more, ...]`, split over the devices.
        num_rows: How many rows are real: the first ones.
        sharding: How they are split where they are cut out.
    """

    __slots__ = ("num_rows", "padded", "sharding")

    def __init__(self, padded: Any, num_rows: int, sharding: NamedSharding):
        """Wraps a padded array."""
        self.padded, self.num_rows, self.sharding = padded, num_rows, sharding

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The padded array is the child; how many rows are real is part of a program."""
        return (self.padded,), (self.num_rows, self.sharding)

    @classmethod
    def tree_unflatten(cls, structure, children):
        """The inverse of `tree_flatten`."""
        return cls(children[0], *structure)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is real."""
        return (self.num_rows, *self.padded.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.padded.ndim

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.padded.dtype

    def cut(self) -> jax.Array:
        """The real rows: split, in a program; whole on every device, outside of one."""
        if is_traced(self.padded):
            real = self.padded[: self.num_rows]
            return jax.lax.with_sharding_constraint(real, self.sharding)
        return _cut_whole(self.padded, self.num_rows, self.sharding.mesh)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The real rows on the host; for a model that Keras builds by calling it."""
        return np.asarray(self.cut(), dtype)


def place(value: Any, distribution: MeshDistribution) -> Any:
    """A leaf of a host batch on the devices: split over them, padded if need be."""
    if value is None or isinstance(value, UnevenRows):
        return value
    if not isinstance(value, jax.Array):
        if not hasattr(value, "__array__"):
            return jax.device_put(value, distribution.whole)  # a sparse one
        value = _canonical(np.asarray(value))
    if value.ndim == 0:
        return jax.device_put(value, distribution.whole)
    num_rows = value.shape[0]
    sharding, parts = distribution.rows_sharding(num_rows)
    missing = -num_rows % parts
    if not missing:
        return jax.device_put(value, sharding)
    padding = np.zeros((missing, *value.shape[1:]), value.dtype)
    padded = jax.device_put(np.concatenate([np.asarray(value), padding]), sharding)
    return UnevenRows(padded, num_rows, sharding)


def place_batch(batch: Any, distribution: MeshDistribution) -> Any:
    """A host batch on the devices."""
    return tree.map_structure(lambda x: place(x, distribution), batch)


def cut_batch(batch: Any) -> Any:
    """The real rows of a batch."""
    return tree.map_structure(lambda x: x.cut() if isinstance(x, UnevenRows) else x, batch)


def _canonical(value: np.ndarray) -> np.ndarray:
    """With the dtype that JAX gives it: padding would double what is to be halved anyway."""
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    return value if dtype == value.dtype else value.astype(dtype)


def _cut_whole(padded: Any, num_rows: int, mesh: Any) -> jax.Array:
    whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda x: x[:num_rows], out_shardings=whole)(padded)
