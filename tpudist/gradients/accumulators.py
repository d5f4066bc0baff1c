"""Adds up the gradients of microbatches, each array split over devices as its parameter is."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from tpudist import context
from tpudist.array_types import PyTree


class Accumulators:
    """Sums of gradients in a wide dtype, which `jax.lax.scan` carries as a list of arrays."""

    def __init__(self, parameters: PyTree, dtype: DTypeLike | None):
        leaves, self._treedef = jax.tree.flatten(parameters)
        self._dtypes = [x.dtype for x in leaves]
        self._shapes = [x.shape for x in leaves]
        self._wide = [dtype or jnp.promote_types(x.dtype, jnp.float32) for x in leaves]
        self._specs = _specs(parameters) if split_axes() else [None] * len(leaves)

    def zeros(self) -> list[jax.Array]:
        """Returns the sums before the first microbatch."""
        return self._constrain(map(jnp.zeros, self._shapes, self._wide))

    def add(self, sums: list[jax.Array], grads: PyTree) -> list[jax.Array]:
        """Returns the sums with the gradients of one more microbatch."""
        # Gradients are placed like the sums before they are added, so that XLA can reduce each one
        # directly to its shard (a reduce-scatter).
        pairs = zip(sums, self._constrain(jax.tree.leaves(grads)), strict=True)
        return self._constrain(s + g.astype(s.dtype) for s, g in pairs)

    def finish(self, sums: list[jax.Array], divide_by: int | None) -> PyTree:
        """Returns the gradients in the structure and dtypes of the parameters."""
        if divide_by is not None:
            sums = [x / divide_by for x in sums]
        return self._treedef.unflatten(
            [x.astype(dtype) for x, dtype in zip(sums, self._dtypes, strict=True)]
        )

    def _constrain(self, arrays: Iterable[jax.Array]) -> list[jax.Array]:
        return [
            x if spec is None else jax.lax.with_sharding_constraint(x, spec)
            for x, spec in zip(arrays, self._specs, strict=True)
        ]


def _specs(parameters: PyTree) -> list[PartitionSpec | None]:
    """Returns the split of each parameter inside a replica, as `strategy.create` places it."""
    strategy = context.get_strategy()
    specs = []
    for leaf in jax.tree.leaves(parameters, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        variable = leaf if isinstance(leaf, nnx.Variable) else None
        for x in jax.tree.leaves(leaf):
            specs.append(strategy._spec_of(x, variable=variable))
    return specs


def split_axes() -> dict[str, int]:
    """Returns the axes inside a replica of several devices, with their sizes."""
    # In the trace of a replica function, the replica axis is Manual and inner axes are Auto.
    mesh = jax.sharding.get_abstract_mesh()
    return {
        axis: mesh.shape[axis]
        for axis, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis_type == AxisType.Auto and mesh.shape[axis] > 1
    }
