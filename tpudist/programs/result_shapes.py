"""Removes the mesh from the shapes that `jax.eval_shape` returns in a replica function.

If all mesh axes are manual, JAX adds the mesh to each `jax.ShapeDtypeStruct` that it returns, with
a spec that splits nothing. Lineax, Optimistix and Diffrax compare these with structs without a
sharding, and reject their own arguments. In a replica of several devices JAX adds nothing.

The first trace of a replica function replaces a property of JAX for the rest of the process, since
libraries also trace parts of a replica function later, when JAX lowers it. Programs without tpudist
keep their meshes: only a mesh with a replica axis is removed.
"""

import functools
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from tpudist.xla.mesh import REPLICA_AXIS


@functools.cache
def leave_out_manual_meshes() -> None:
    """Makes JAX return shapes without a mesh of replicas whose axes are all manual."""
    # `jax.eval_shape` returns the `out_info` of a trace. jax 0.10 to 0.12 have this property.
    traced_class: Any = jax.stages.Traced
    original = traced_class.out_info

    def out_info(traced: jax.stages.Traced) -> Any:
        return jax.tree.map(_without_manual_mesh, original.fget(traced))

    traced_class.out_info = property(out_info)


def _without_manual_mesh(leaf: object) -> object:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return leaf
    axes = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    is_replica = REPLICA_AXIS in axes and {*axes.values()} == {AxisType.Manual}
    return leaf.update(sharding=None) if is_replica else leaf
