"""Lets `jax.eval_shape` in a replica function return shapes that compare equal to others.

Where all mesh axes are manual, JAX adds the mesh to each `jax.ShapeDtypeStruct` that it returns,
with a spec that splits nothing. Libraries compare these with structs that have no sharding:
Lineax, Optimistix and Diffrax reject their own arguments then. In a replica of several devices JAX
adds nothing.

JAX is touched when the first replica function is traced. Only meshes with a replica axis lose their
place in a struct: libraries also trace parts of a replica function when JAX lowers it.
"""

import functools
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from tpudist.xla.mesh import REPLICA_AXIS


@functools.cache
def leave_out_manual_meshes() -> None:
    """Returns shapes without a mesh of replicas whose axes are all manual, from now on."""
    original: Any = jax.stages.Traced.out_info

    def out_info(traced: jax.stages.Traced) -> Any:
        return jax.tree.map(_leave_out_mesh, original.fget(traced))

    jax.stages.Traced.out_info = property(out_info)  # type: ignore[assignment]


def _leave_out_mesh(shape: Any) -> Any:
    sharding = getattr(shape, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(shape, jax.ShapeDtypeStruct):
        return shape
    axes = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    is_replica = REPLICA_AXIS in axes and {*axes.values()} == {AxisType.Manual}
    return shape.update(sharding=None) if is_replica else shape
