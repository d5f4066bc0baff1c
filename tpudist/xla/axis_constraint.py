"""Constrains which mesh axes split an array, and leaves all other axes to XLA.

`jax.lax.with_sharding_constraint` constrains dims: XLA may split an open dim over any axis. Shardy
can also exclude axes ("replicated"), for which JAX has no function. So this is a new primitive.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import AxisType
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

# Without rules for derivatives and batching: only finished programs get constraints.
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
    """Returns the array, split by `axes` along the first of `dims` that they divide, or unsplit.

    Only `axes` split that dim: without axes, no axis splits the first of `dims`. The other axes may
    split the other dims, as XLA chooses.

    Args:
        x: Array in a program that is traced under a mesh with these axes.
        axes: Mesh axes to constrain.
        dims: Dims that `axes` may split.
        whole_dims: Dims that no axis splits.
        whole_axes: Axes that split no dim.
    """
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[axis] for axis in axes)
    split_dim = next((dim for dim in dims if x.shape[dim] % parts == 0), None)
    return _constrain.bind(
        x,
        mesh=tuple((str(name), size) for name, size in mesh.shape.items()),
        axes=() if split_dim is None else tuple(axes),
        split_dim=split_dim,
        whole_axes=(*whole_axes, *(axes if split_dim is None else ())),
        whole_dims=tuple(whole_dims),
    )


def axes_of(axis_type: AxisType) -> tuple[str, ...]:
    """Returns the axes of the current abstract mesh that have this type and several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(str(name) for name, x in axes if x == axis_type and mesh.shape[name] > 1)


def axes_that_divide(size: int, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes if a dim of this size can be split over them; otherwise no axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if size % math.prod(mesh.shape[axis] for axis in axes) else tuple(axes)


def _lower(
    context: mlir.LoweringRuleContext,
    x: ir.Value,
    *,
    mesh: tuple[tuple[str, int], ...],
    axes: tuple[str, ...],
    split_dim: int | None,
    whole_axes: tuple[str, ...],
    whole_dims: tuple[int, ...],
) -> list[ir.Value]:
    # A closed dim (`is_closed`) has exactly the axes that are named; XLA may split an open one.
    def layout(dim: int) -> sdy.DimensionShardingAttr:
        names = axes if dim == split_dim else ()
        refs = [sdy.AxisRefAttr.get(name) for name in names]
        return sdy.DimensionShardingAttr.get(refs, is_closed=dim in (*whole_dims, split_dim))

    (aval,) = context.avals_in
    assert isinstance(aval, ShapedArray)
    whole_along = [sdy.AxisRefAttr.get(axis) for axis, _ in mesh if axis in whole_axes]
    sharding = sdy.TensorShardingAttr.get(
        sdy.MeshAttr.get([sdy.MeshAxisAttr.get(name, size) for name, size in mesh]),
        [layout(dim) for dim in range(len(aval.shape))],
        replicated_axes=whole_along,  # Shardy requires the order of the mesh
    )
    return [sdy.ShardingConstraintOp(x, sharding).result]


mlir.register_lowering(_constrain, _lower)
