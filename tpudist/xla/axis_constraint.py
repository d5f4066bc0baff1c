"""Tells XLA which mesh axes split an array and which do not, and leaves all others to it.

`jax.lax.with_sharding_constraint` speaks of dims: one that is left to XLA may be split over any
axis. Shardy can be told of axes as well ("replicated"), for which JAX has no function, so this is
an operation of its own.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import AxisType
from jaxlib.mlir.dialects import sdy

_constrain: Any = core.Primitive("tpudist_constrain_axes")
_constrain.def_abstract_eval(lambda x, **_: x)


def constrain_axes(
    x: jax.Array,
    axes: Sequence[str],
    dims: Sequence[int] = (),
    *,
    whole_dims: Sequence[int] = (),
    whole_axes: Sequence[str] = (),
) -> jax.Array:
    """The array, which `axes` split along the first of `dims` that they divide, or not at all.

    Other axes do not split that dim.

    Args:
        x: In a program that is traced under a mesh with these axes; what it is on other meshes is
            for JAX to say.
        axes: Mesh axes. What the other ones split is left to XLA.
        dims: Where `axes` may be.
        whole_dims: What no axis splits.
        whole_axes: Axes that split nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[axis] for axis in axes)
    at = next((dim for dim in dims if x.shape[dim] % parts == 0), None)
    return _constrain.bind(
        x,
        mesh=tuple((str(name), size) for name, size in mesh.shape.items()),
        axes=() if at is None else tuple(axes),
        split_dim=at,
        whole_axes=(*whole_axes, *(axes if at is None else ())),
        whole_dims=tuple(whole_dims),
    )


def axes_of(kind: AxisType) -> tuple[str, ...]:
    """The mesh axes here that are of a kind, and of several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(str(a) for a, of in kinds if of == kind and mesh.shape[a] > 1)


def axes_that_divide(size: int, axes: Sequence[str]) -> tuple[str, ...]:
    """The axes, if a dim of this size can be split over them; otherwise none."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if size % math.prod(mesh.shape[axis] for axis in axes) else tuple(axes)


def _lower(context: Any, x: Any, *, mesh, axes, split_dim, whole_axes, whole_dims) -> list[Any]:
    def layout(dim: int) -> Any:
        names = axes if dim == split_dim else ()
        refs = [sdy.AxisRefAttr.get(name) for name in names]
        return sdy.DimensionShardingAttr.get(refs, is_closed=dim in (*whole_dims, split_dim))

    whole_along = [sdy.AxisRefAttr.get(axis) for axis, _ in mesh if axis in whole_axes]
    sharding = sdy.TensorShardingAttr.get(
        sdy.MeshAttr.get([sdy.MeshAxisAttr.get(name, size) for name, size in mesh]),
        [layout(dim) for dim in range(len(context.avals_in[0].shape))],
        replicated_axes=whole_along,  # in the order of the mesh, as Shardy asks for
    )
    return [sdy.ShardingConstraintOp(x, sharding).result]


mlir.register_lowering(_constrain, _lower)
