"""Gives NNX Variables one value per replica: a PerReplica.

The rule `aggregation="none"`, of a Variable or of `RunOptions`, allows it, and the proof of a trace
shows which Variables need it. These get one value per replica, and the function is traced again.
Inputs and outputs then have the same kind, and the first call compiles only once.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tpudist.lowering import placement
from tpudist.reduce_op import VariableAggregation
from tpudist.state import nnx_binding
from tpudist.values.per_replica import PerReplica, is_per_replica
from tpudist.xla.mesh import ReplicaMesh


def make_local(
    binding: nnx_binding.Binding, leaves: Collection[tuple[int, int]], mesh: ReplicaMesh
) -> None:
    """Gives each replica its own copy of some arrays of NNX Variables, in place.

    `leaves` are pairs of a leaf of the binding and an array of that leaf. If an array is a sum over
    examples, the first replica gets the whole sum, and the others zeros.
    """
    values = binding.values()
    for i in dict.fromkeys(i for i, _ in leaves):
        is_sum = binding.aggregation(i) is VariableAggregation.SUM
        arrays, structure = jax.tree.flatten(values[i], is_leaf=is_per_replica)
        for j, x in enumerate(arrays):
            if (i, j) in leaves and not is_per_replica(x):
                arrays[j] = PerReplica(_stack(x, mesh, is_sum=is_sum))
        nnx_binding.write([binding.variables[i]], [structure.unflatten(arrays)])


def _stack(x: Any, mesh: ReplicaMesh, *, is_sum: bool) -> jax.Array | jax.ShapeDtypeStruct:
    shape = mesh.num_replicas, *jnp.shape(x)
    spec = x.sharding.spec if mesh.has_whole(x) else PartitionSpec()
    sharding = NamedSharding(mesh.mesh, PartitionSpec(mesh.replica_axis, *spec))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    def stack(x: jax.Array) -> jax.Array:
        copies = jnp.broadcast_to(x[None], shape)
        return copies.at[1:].set(0) if is_sum else copies

    x = placement.prepare_step_input(mesh, jnp.asarray(x), is_stacked=False, abstract=False)
    return jax.jit(stack, out_shardings=sharding)(x)
