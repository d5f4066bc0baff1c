"""State of NNX objects that each replica has for itself: its Variables hold a PerReplica.

A rule says which may (`aggregation="none"`, of a Variable or of `RunOptions`), and the proof of a
trace shows which do. These Variables get one value for each replica, and the function is traced
again. So inputs and outputs have the same kind, and the first call is compiled once.
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

    Of a sum over examples the first replica has all that there was.

    Args:
        binding: The NNX objects.
        leaves: The leaves of it, each with the array of it.
        mesh: The replicas.
    """
    values = binding.values()
    for i in dict.fromkeys(i for i, _ in leaves):
        is_sum = binding.aggregation(i) is VariableAggregation.SUM
        arrays, structure = jax.tree.flatten(values[i], is_leaf=is_per_replica)
        for j, x in enumerate(arrays):
            if (i, j) in leaves and not is_per_replica(x):
                arrays[j] = PerReplica(_stack(x, mesh, is_sum=is_sum))
        nnx_binding.write([binding.variables[i]], [structure.unflatten(arrays)])


def _stack(x: Any, mesh: ReplicaMesh, *, is_sum: bool) -> Any:
    shape = mesh.num_replicas, *jnp.shape(x)
    spec = x.sharding.spec if mesh.has_whole(x) else PartitionSpec()
    sharding = NamedSharding(mesh.mesh, PartitionSpec(mesh.replica_axis, *spec))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    def stack(x: jax.Array) -> jax.Array:
        every = jnp.broadcast_to(x[None], shape)
        return every.at[1:].set(0) if is_sum else every

    x = placement.prepare_step_input(mesh, jnp.asarray(x), is_stacked=False, abstract=False)
    return jax.jit(stack, out_shardings=sharding)(x)
